"""`paceline plan` of a DDP script: its steps with torch's class and with ours, on one machine and on several."""

import json
import re
import subprocess
import sys

import pytest
from test_unedited import SCRIPT, SPAWNS

import sshd
from launching import begin, finish, from_outside
from needs import needs
from paceline.ddp import import_hook, stopwatch
from paceline.planner import ddp_script

pytestmark = pytest.mark.long
WAYS = "torch's class", "paceline's class", ddp_script.UPDATING
ENDLESS = SCRIPT.replace("range(3)", "range(10**9)")
ONE_PORT = (
    SPAWNS.replace("import os, sys", "import os, sys, socket")
    .replace("sys.argv[1]", "str(free())")
    .replace(
        "def child",
        """def free():
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return line.getsockname()[1]

def child""",
    )
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.dear
def test_a_plan_times_torchs_class_and_ours(folder):
    (folder / "long.py").write_text(SCRIPT.replace("range(3)", "range(10**9)"))
    command = [sys.executable, "-m", "paceline", "plan", "--rows", "processes:2", "long.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=True)
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"1 process: \S+ s per step, global batch 8", lines[0])
    for line, way in zip(lines[1:4], WAYS, strict=True):
        assert re.fullmatch(rf"2 processes, {way}: \S+ s per step, global batch 16, \S+x the samples per second", line)
    assert re.fullmatch(r"paceline's class: \S+x torch's", lines[4])
    assert re.match(r"paceline.join in place of the wrapper: (up to \d+\.\d\dx as fast, as .+; )?plans", lines[-1])


@pytest.mark.parametrize(
    ("updating_s", "gain"),
    [
        (1.6, "up to 1.60x as fast, as a step that sends nothing; "),
        (1.0, "up to 2.00x as fast, as updates in the exchange; "),  # no gradients of large layers are computed
        (0.0, "up to 1.60x as fast, as a step that sends nothing; "),  # refused
    ],
)
def test_what_join_would_add_is_what_the_faster_of_two_ways_saves(updating_s, gain):
    found = [
        ddp_script.Timing("1 process", 1, 1.0, 0.0, 8),
        ddp_script.Timing("2 processes, torch's class", 2, 4.0, 1.25, 8),
        ddp_script.Timing("2 processes, paceline's class", 2, 2.0, 1.25, 8),
        ddp_script.Timing(f"2 processes, {ddp_script.UPDATING}", 2, updating_s, 0.0, 8, "" if updating_s else "why"),
    ]
    lines = ddp_script.report(found, 2)
    assert lines[2] == f"2 processes, {WAYS[1]}: 2 s per step, global batch 16, 1.00x the samples per second"
    assert lines[4] == "paceline's class: 2.00x torch's"
    assert lines[-1].startswith(f"paceline.join in place of the wrapper: {gain}plans")


def test_where_nothing_would_be_faster_join_is_promised_no_speed():
    found = [ddp_script.Timing(f"2 processes, {way}", 2, 1.0, 1.25, 8) for way in WAYS[:2]]
    assert ddp_script.report(found, 2)[-1].startswith("paceline.join in place of the wrapper: plans")


@pytest.mark.dear
@pytest.mark.parametrize("kind", [import_hook.TORCHS, ""])
def test_the_steps_after_those_that_are_timed_send_nothing(folder, kind):
    (folder / "long.py").write_text(
        ENDLESS.replace("torch.randn(8, 300)", "torch.full((8, 300), dist.get_rank() + 1.0)").replace(
            "        optimizer.step()",
            "        print(model.module[0].weight.grad.sum().item(), file=open(f'rank{dist.get_rank()}', 'a'))",
        )
    )
    given = {import_hook.TIMED: "1", import_hook.VARIABLE: kind}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paceline.ddp"]
    from_outside([*run, "long.py"], folder, **given)
    one, other = [(folder / f"rank{rank}").read_text().split() for rank in (0, 1)]
    summed = stopwatch.BEFORE + stopwatch.TIMED
    assert len(one) == len(other) == summed + stopwatch.ALONE == ddp_script.STEPS
    assert [a == b for a, b in zip(one, other, strict=True)] == [True] * summed + [False] * stopwatch.ALONE


@pytest.mark.dear
def test_a_script_that_ends_too_soon_to_be_timed_is_told(folder):
    command = [sys.executable, "-m", "paceline", "plan", "--rows", "processes:1", "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert f"it ended before {ddp_script.STEPS} steps under DistributedDataParallel" in done.stdout
    assert "script.py could not be timed" in done.stderr


@pytest.mark.dear
def test_a_script_that_starts_its_processes_itself_is_timed_with_as_many_as_it_starts(folder):
    """Story: two launchers had each started two ranks, on one port."""
    (folder / "script.py").write_text(ENDLESS)
    (folder / "spawns.py").write_text(f"# DistributedDataParallel\n{ONE_PORT}")
    output, _ = finish(begin("plan", "--json", "spawns.py", cwd=folder))
    found = json.loads(output)
    assert [(one["ranks"], one["rows"], one["error"]) for one in found] == [(2, 8, "")] * 3
    assert all(one["step_s"] > 0 for one in found)


@pytest.mark.dear
@needs(sshd=sshd.unavailable())
def test_several_machines_are_timed_too(folder):
    (folder / "long.py").write_text(ENDLESS)
    with sshd.Sshd() as hosts:
        words = "-H", "one,two", "--ssh", hosts.ssh, "--rows", "processes:1", "--json"
        output, _ = finish(begin("plan", *words, folder / "long.py", cwd=folder))
    found = json.loads(output)
    assert [one["name"] for one in found] == [
        "1 process",
        *(f"2 processes on 2 machines, {way}" for way in WAYS),
    ]
    assert [(one["ranks"], one["rows"], one["error"]) for one in found] == [(1, 8, ""), *[(2, 8, "")] * 3]


@pytest.mark.parametrize("words", [("--budget", "3"), ("--nodes", "2", "--link", "1gbit"), ("--out", "plan.toml")])
def test_what_is_not_done_with_such_a_script_is_refused(folder, words):
    _, errors = finish(begin("plan", *words, "script.py", cwd=folder), 2)
    said = f"leave {', '.join(words[::2])} out; -H, --rows processes:k and --json are accepted"
    assert said in " ".join(errors.split())
