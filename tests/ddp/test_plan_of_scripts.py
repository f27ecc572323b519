"""`paceline plan` of a DDP script: its steps with torch's class and with ours, on one machine and on several."""

import json
import re
import subprocess
import sys

import pytest
from test_unedited import SCRIPT, SPAWNS

import sshd
from launching import begin, finish
from needs import needs

pytestmark = pytest.mark.long
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
    for line, whose in zip(lines[1:3], ("torch", "paceline"), strict=True):
        assert re.fullmatch(
            rf"2 processes, {whose}'s class: \S+ s per step, global batch 16, \S+x the samples per second", line
        )
    assert re.fullmatch(r"paceline's class: \S+x torch's", lines[3])
    assert lines[-1].startswith("paceline.join in place of the wrapper")


@pytest.mark.dear
def test_a_script_that_ends_too_soon_to_be_timed_is_told(folder):
    command = [sys.executable, "-m", "paceline", "plan", "--rows", "processes:1", "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "it ended before 18 steps under DistributedDataParallel" in done.stdout
    assert "script.py could not be timed" in done.stderr


@pytest.mark.dear
def test_a_script_that_starts_its_processes_itself_is_timed_with_as_many_as_it_starts(folder):
    """Story: two launchers had each started two ranks, on one port."""
    (folder / "script.py").write_text(ENDLESS)
    (folder / "spawns.py").write_text(f"# DistributedDataParallel\n{ONE_PORT}")
    output, _ = finish(begin("plan", "--json", "spawns.py", cwd=folder))
    found = json.loads(output)
    assert [(one["ranks"], one["rows"], one["error"]) for one in found] == [(2, 8, ""), (2, 8, "")]
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
        "2 processes on 2 machines, torch's class",
        "2 processes on 2 machines, paceline's class",
    ]
    assert [(one["ranks"], one["rows"], one["error"]) for one in found] == [(1, 8, ""), (2, 8, ""), (2, 8, "")]


@pytest.mark.parametrize("words", [("--budget", "3"), ("--nodes", "2", "--link", "1gbit"), ("--out", "plan.toml")])
def test_what_is_not_done_with_such_a_script_is_refused(folder, words):
    _, errors = finish(begin("plan", *words, "script.py", cwd=folder), 2)
    said = f"leave {', '.join(words[::2])} out; -H, --rows processes:k and --json are accepted"
    assert said in " ".join(errors.split())
