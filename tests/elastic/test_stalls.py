"""A stalled process is named by every process that waits for it, with stack and duration; a stopped one is declared
failed in time."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from launching import HERE, command, environment, launch
from paceline.report.record import read

pytestmark = pytest.mark.long

DEADLINE_S = 90.0
OUTLIVED = (
    "import sys; from paceline.launch import local;"
    "sys.exit(local.start(sys.argv[3:], 'sequential', int(sys.argv[1]), min_nodes=int(sys.argv[2])))"
)


class Run:
    """A launcher, its stderr so far, and its processes by their names."""

    def __init__(self, words, folder, names, **more):
        self.folder, self.errors = folder, folder / "errors"
        with open(self.errors, "wb") as file:
            self.process = subprocess.Popen(words, env=environment(**more), stderr=file)
        self.pids = {}
        for name in names:
            self.until(lambda name=name: (folder / name).exists(), "not training")
            self.pids[name] = int((folder / name).read_text())

    def until(self, condition, what, limit_s=DEADLINE_S):
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"{what}: {self.said}"
            time.sleep(0.05)

    @property
    def said(self):
        return self.errors.read_text()

    def end(self):
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    runs = []

    def begin(*arguments, names, engine="sequential", num_nodes=1, least=0, **more):
        words = command("stuck.py", tmp_path, *arguments, engine=engine, num_nodes=num_nodes)
        if least:
            script = [sys.executable, str(HERE / "scripts" / "stuck.py"), str(tmp_path), *map(str, arguments)]
            words = [sys.executable, "-c", OUTLIVED, str(num_nodes), str(least), *script]
        runs.append(Run(words, tmp_path, names, **more))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def doctor(run, *more):
    words = [sys.executable, "-m", "paceline", "doctor", "--run", str(run), *more]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.dear
@pytest.mark.parametrize("who", [0, 1])
def test_every_node_that_waits_tells_it_within_fifteen_seconds(start, who):
    """Also where rank 0 hangs, which forwards the reports of all others."""
    run = start(who, 30, names=["0.0", "1.0", "2.0"], num_nodes=3, DEADLINES="real")
    run.until((run.folder / "asleep").exists, "not asleep")
    begin = time.monotonic()
    waiting = [rank for rank in range(3) if rank != who]
    line = r"paceline: rank {} of 3 on \S+ at step 30 has waited \d+ s .*; not there: rank {} on \S+, at step 30"
    run.until(lambda: all(re.search(line.format(rank, who), run.said) for rank in waiting), "not told", 15.0)
    run.until(lambda: run.said.count("in asleep") >= len(waiting), "no stacks", 15.0 - (time.monotonic() - begin))


@pytest.mark.dear
def test_a_hang_is_told_with_its_stack_and_a_stopped_process_is_named_as_stalled(start):
    run = start(1, 30, names=["0.0", "1.0"], num_nodes=2, PACELINE_RUN="0117-hang")
    run.until(lambda: "is executing" in run.said and "in asleep" in run.said, "not told")
    words = (
        r"paceline: rank 0 of 2 on (\S+) at step 30 has waited \d+ s for others in agreeing on the step.*; not there: "
        r"rank 1 on \1, at step 30: computing the gradient, for \d+\.\d s; a step took "
    )
    assert re.search(words, run.said), run.said
    assert [event["step"] for event in read(run.folder) if event["event"] == "late"] == [30]

    seen = doctor(run.folder, "--stacks")
    assert seen.returncode == 0, seen.stderr
    assert re.search(r"rank 0 on \S+, at step 30: agreeing on the step.*; waits for rank 1\n", seen.stdout)
    assert re.search(r"rank 1 on \S+, at step 30: computing the gradient, for ", seen.stdout)
    assert "in asleep" in seen.stdout
    assert seen.stdout.count("rank 1 of 2 on ") == 1
    other = doctor("0118")
    assert other.returncode == 2
    assert "no process of run '0118' answers on this machine" in other.stderr
    assert "0117-hang" in other.stderr

    os.kill(run.pids["1.0"], signal.SIGSTOP)
    run.until(lambda: "is stalled" in run.said, "not named")
    assert re.search(
        r"paceline: rank 0 of 2 on (\S+) at step 30: lost rank 1 on \1 during .*: it is stalled: its machine answers, "
        r"its process has not for \d s",
        run.said,
    ), run.said


@pytest.mark.dear
def test_a_stopped_process_of_a_node_is_told_at_once_and_given_up_in_time(start):
    run = start(names=["0.0", "0.1"], engine="processes:2", LEAST_S="1.5")
    os.kill(run.pids["0.1"], signal.SIGSTOP)
    run.until(lambda: f"which is stopped (state T); kill -CONT {run.pids['0.1']}" in run.said, "not told")
    run.until(lambda: f"its process {run.pids['0.1']} has been stopped (state T) for" in run.said, "not given up")
    assert re.search(r"paceline: .*local rank 0 lost local rank 1 of this node while ", run.said)


@pytest.mark.dear
def test_a_stopped_process_that_goes_on_in_time_costs_nothing_but_time(start):
    run = start(names=["0.0", "0.1"], engine="processes:2", LEAST_S="20")
    os.kill(run.pids["0.1"], signal.SIGSTOP)
    run.until(lambda: "is stopped (state T)" in run.said, "not told")
    os.kill(run.pids["0.1"], signal.SIGCONT)
    (run.folder / "enough").touch()
    run.until(lambda: run.process.poll() is not None, "does not end")
    assert run.process.returncode == 0, run.said


@pytest.mark.dear
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on_without_a_stalled_node_and_it_does_not_go_on_without_them(start, victim):
    run = start(names=[f"{node}.0" for node in range(3)], num_nodes=3, least=2)
    os.kill(run.pids[f"{victim}.0"], signal.SIGSTOP)
    run.until(lambda: "2 of 3 nodes continue" in run.said, "they do not go on")
    assert "it is stalled" in run.said
    steps = len([event for event in read(run.folder) if event["event"] == "step"])
    run.until(lambda: len([e for e in read(run.folder) if e["event"] == "step"]) > steps + 20, "they stand still")
    if victim:
        os.kill(run.pids[f"{victim}.0"], signal.SIGCONT)
        run.until(lambda: "continued without it" in run.said, "it goes on as well")
    (run.folder / "enough").touch()
    if victim == 0:
        os.kill(run.pids["0.0"], signal.SIGKILL)
    run.until(lambda: run.process.poll() is not None, "do not end")
    assert run.process.returncode == 0, run.said


@pytest.mark.dear
def test_who_stands_still_until_all_others_have_ended_does_not_go_on_alone(start):
    """Story: the others had ended, as if they had been killed, so it continued, and saved over their checkpoint."""
    victim = 0
    run = start(names=[f"{node}.0" for node in range(3)], num_nodes=3, least=1)
    os.kill(run.pids[f"{victim}.0"], signal.SIGSTOP)
    run.until(lambda: "2 of 3 nodes continue" in run.said, "they do not go on")
    (run.folder / "enough").touch()
    others = [run.pids[f"{node}.0"] for node in range(3) if node != victim]
    run.until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in others), "they do not end")
    (run.folder / "enough").unlink()
    os.kill(run.pids[f"{victim}.0"], signal.SIGCONT)
    run.until(lambda: "may have continued without this process" in run.said, "it goes on alone")


@pytest.mark.dear
def test_an_undisturbed_run_says_nothing(start):
    run = start(names=["0.0", "1.0"], num_nodes=2, LEAST_S="5")
    (run.folder / "enough").touch()
    run.until(lambda: run.process.poll() is not None, "does not end")
    assert (run.process.returncode, run.said) == (0, "")
    assert not [event for event in read(run.folder) if event["event"] in ("late", "straggler")]


@pytest.mark.dear
def test_a_hang_inside_a_node_is_told_with_the_stack_of_who_hangs(start):
    """Local rank 1 computes for ever; this ends no process."""
    run = start(0, 30, 1, names=["0.0", "0.1"], engine="processes:2", LEAST_S="1.5")
    run.until(lambda: "in asleep" in run.said, "not told")
    words = r"paceline: local rank 0 on \S+ at step 30 has waited \d+ s, computing the step, for local rank 1 \(pid "
    assert re.search(words + str(run.pids["0.1"]), run.said), run.said
    assert run.process.poll() is None
    seen = doctor(run.folder)
    assert re.search(r"rank 0, local rank 1, pid \d+, at step 30: computing the gradient, for ", seen.stdout), seen


@pytest.mark.dear("given up", "not long enough")
@pytest.mark.parametrize(
    ("seconds", "what", "says"),
    [
        (0.0, "wait", r"one of all 0\.0"),
        (3.5, "wait", r"one of all [0-2]\."),
        (6.0, "go on", r"lost rank 0 .* making sure that the others are still there"),
    ],
    ids=["never stopped", "not long enough", "given up"],
)
def test_who_stood_still_makes_sure_that_it_is_still_one_of_all(tmp_path, seconds, what, says):
    """Story: a stopped node found all votes when it resumed, and applied a step that the others had computed again."""
    launch("certain.py", tmp_path, seconds, what, engine="sequential", num_nodes=2)
    assert re.match(says, (tmp_path / "said").read_text())
