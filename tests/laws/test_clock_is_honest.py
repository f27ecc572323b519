"""What is reported is what the steps took: warm-up left out, the same last step on every process."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys

import psutil
import pytest

from launching import HERE, launch
from paceline.planner.measure import fresh_process, stopwatch
from paceline.planner.measure.stopwatch import (
    FEWEST_STEPS,
    MAX_STEPS,
    MIN_STEPS,
    TIMED_S,
    TIMEOUT_FACTOR,
    WARM_UP_STEPS,
    Stopwatch,
)
from paceline.planner.measure.trial import _whole, measure
from waiting import VirtualTime, until

SLEEP_S = 0.01
SHORT_S = TIMED_S / MIN_STEPS  # agreed seconds per step for which MIN_STEPS steps are enough


def tick_until_stopped(watch, agreed_s, work=lambda step: None, samples=4):
    """The number of steps until the watch ends the process."""
    steps = []

    def train():
        for step in range(1000):
            steps.append(step)
            work(step)
            watch.tick(watch.part(samples), agreed_s(step) if callable(agreed_s) else agreed_s)

    with pytest.raises(SystemExit) as end:
        train()
    assert end.value.code == 0
    return len(steps)


@pytest.fixture
def report(tmp_path):
    return tmp_path / "trial.json"


@pytest.fixture
def hours(monkeypatch):
    monkeypatch.setattr(stopwatch, "time", VirtualTime())
    return stopwatch.time


def test_a_sleeping_step_is_measured_as_it_sleeps(report, hours):
    """The warm-up sleeps ten times longer, and must not be seen."""
    watch = Stopwatch(report)
    tick_until_stopped(watch, SHORT_S, lambda step: hours.sleep(SLEEP_S * (10 if step < WARM_UP_STEPS else 1)))
    assert json.loads(report.read_text())["steps_s"] == [pytest.approx(SLEEP_S)] * MIN_STEPS


def test_steps_and_samples_of_the_warm_up_are_not_counted(report):
    steps = tick_until_stopped(Stopwatch(report), SHORT_S, samples=4)
    said = json.loads(report.read_text())
    assert steps == said["num_steps"] == WARM_UP_STEPS + MIN_STEPS
    assert said["samples"] == [4] * MIN_STEPS
    assert said["rows"] == 4
    assert said["peak_bytes"] > 2**20


def test_a_pause_between_steps_is_not_a_step(report, hours):
    """Evaluating or saving takes time, too; after it the next step is counted anew."""
    watch = Stopwatch(report)

    def work(step):
        hours.sleep(10 * SLEEP_S)
        watch.resume()
        hours.sleep(SLEEP_S)

    tick_until_stopped(watch, SHORT_S, work)
    assert json.loads(report.read_text())["steps_s"] == [pytest.approx(SLEEP_S)] * MIN_STEPS


@pytest.mark.parametrize("wanted", [8, 16, 128, 1024])
def test_it_ends_when_the_agreed_time_is_enough_but_not_before_or_after_the_limits(wanted):
    """Powers of two, so that this many steps add up to the time wanted without rounding."""
    assert 128 < MAX_STEPS < 1024
    steps = tick_until_stopped(Stopwatch(None), TIMED_S / wanted)
    assert steps - WARM_UP_STEPS == min(MAX_STEPS, max(MIN_STEPS, wanted))


@pytest.mark.parametrize("agreed_s", [TIMED_S, 2 * TIMED_S, 100 * TIMED_S])
def test_long_steps_are_few_and_one_of_them_is_warm_up_enough(agreed_s):
    steps = tick_until_stopped(Stopwatch(None), agreed_s)
    assert steps == 1 + max(FEWEST_STEPS, -(-TIMEOUT_FACTOR * TIMED_S // agreed_s))


def test_processes_with_different_clocks_stop_at_the_same_step(report, hours):
    """Both are told the same agreed seconds; what their own clocks say is three times apart."""
    leader, follower = Stopwatch(report), Stopwatch(None)
    stopped = [
        tick_until_stopped(watch, lambda step: 0.05 * (1 + step % 3), lambda _, nap_s=nap_s: hours.sleep(nap_s))
        for watch, nap_s in ((leader, SLEEP_S / 2), (follower, 3 * SLEEP_S / 2))
    ]
    assert stopped[0] == stopped[1]
    assert WARM_UP_STEPS + MIN_STEPS < stopped[0] < WARM_UP_STEPS + MAX_STEPS
    assert statistics.median(follower.steps_s) == pytest.approx(3 * statistics.median(leader.steps_s))


def test_between_averages_nobody_stops_and_every_step_costs_its_part_of_them(report, hours):
    """All hear of each other in every fourth step, which takes longer by that."""
    steps = tick_until_stopped(
        Stopwatch(report),
        lambda step: SHORT_S if step % 4 == 3 else None,
        lambda step: hours.sleep(SLEEP_S * (4 if step % 4 == 3 else 1)),
    )
    assert steps == 4 + MIN_STEPS
    assert json.loads(report.read_text())["steps_s"] == [pytest.approx(7 * SLEEP_S / 4)] * MIN_STEPS


def test_a_script_that_ends_between_averages_is_told_with_all_its_steps(report):
    watch = Stopwatch(report)
    for step in range(7):
        watch.tick(4, 0.1 if step == 3 else None)
    watch.write()
    assert json.loads(report.read_text())["num_steps"] == 7


@pytest.mark.dear
def test_nodes_that_average_now_and_then_stop_at_the_same_step(tmp_path, monkeypatch):
    """One has ten times the work of the other, and neither knows when it began."""
    monkeypatch.setenv("PACELINE_TRIAL", str(tmp_path / "trial.json"))
    monkeypatch.setenv("PACELINE_TRIAL_S", "0.4")
    launch("uneven.py", tmp_path, engine="sequential", num_nodes=2)
    stopped = [(tmp_path / f"{node}.steps").read_text() for node in (0, 1)]
    assert stopped[0] == stopped[1]
    assert int(stopped[0]) % 4 == 1, "all have heard of each other in the step before"
    assert json.loads((tmp_path / "trial.json").read_text())["num_steps"] == int(stopped[0])


def test_the_leader_reports_times_and_everyone_its_memory(monkeypatch, report):
    monkeypatch.setenv("PACELINE_TRIAL", str(report))
    monkeypatch.setenv("PACELINE_TRIAL_S", "0.5")
    tick_until_stopped(Stopwatch.of_environment(leader=False), 0.1)
    assert not report.exists()
    assert json.loads(report.with_name(f"trial.json.{os.getpid()}").read_text()).keys() == {"peak_bytes"}
    tick_until_stopped(Stopwatch.of_environment(leader=True), 0.1)
    assert "steps_s" in json.loads(report.read_text())
    assert len(list(report.parent.iterdir())) == 2, "a half-written file was left"


def test_without_a_trial_there_is_no_clock(monkeypatch):
    monkeypatch.delenv("PACELINE_TRIAL", raising=False)
    assert Stopwatch.of_environment(leader=True) is None


def test_a_long_step_is_extrapolated_from_parts_of_its_batch(report, hours):
    """A step that sleeps 20 ms and 1 ms a row, seen at 16 and 32 rows of 64."""
    watch = Stopwatch(report, timed_s=0.1, shrinks=True)
    rows = []

    def train():
        while True:
            rows.append(watch.part(64))
            hours.sleep(0.02 + 0.001 * rows[-1])
            watch.tick(float(rows[-1]), 0.05)

    with pytest.raises(SystemExit):
        train()
    assert set(rows) == {16, 32}
    step_s, spread_s, whole = _whole(json.loads(report.read_text()))
    assert whole == 64
    assert step_s == pytest.approx(0.084)
    assert spread_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("whole", [1, 2, 3, 4, 7, 8, 9])
def test_a_small_batch_is_not_passed_off_as_a_part_of_it(report, whole, hours):
    """Story: a batch of 3 was measured by steps of one row."""
    watch, seen = Stopwatch(report, timed_s=0.1, shrinks=True), set()

    def train():
        while True:
            seen.add(rows := watch.part(whole))
            hours.sleep(0.02 + 0.001 * rows)
            watch.tick(float(rows), 0.05)

    with pytest.raises(SystemExit):
        train()
    step_s, _, rows = _whole(json.loads(report.read_text()))
    assert (step_s, rows) == (pytest.approx(0.02 + 0.001 * whole), whole)
    assert min(seen) >= min(2, whole), "batch norm needs two rows"
    assert whole < 4 or max(seen) < whole


SLEEPS = f"""
import sys
sys.path.append({str(HERE)!r})
from paceline.planner.measure import stopwatch as clock
from waiting import VirtualTime, until
clock.time = VirtualTime()
watch = clock.Stopwatch.of_environment(leader=True)
for step in range(int(sys.argv[1])):
    clock.time.sleep({SLEEP_S} * (1 + step % 2))
    watch.tick(8, 0.1)
if len(sys.argv) > 2:
    sys.exit(sys.argv[2])
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        (tmp_path / "script.py").write_text(text)
        return str(tmp_path / "script.py")

    return write


def test_a_sleeping_script_is_measured_as_it_sleeps(script):
    """Through the command, in a process of its own: median, notch, samples per second."""
    trial = measure([script(SLEEPS), "1000"], "sequential")
    assert not trial.error
    assert {round(step_s / SLEEP_S, 6) for step_s in trial.steps_s} == {1, 2}
    assert trial.step_s == statistics.median(trial.steps_s)
    assert trial.per_s == pytest.approx(8 / trial.step_s)
    assert SLEEP_S / 8 < trial.spread_s < 3 * SLEEP_S  # every other step is twice as long


@pytest.mark.parametrize("steps", [3, 5])
def test_a_script_with_few_steps_is_measured_with_those_it_has(script, steps):
    """The whole range is the spread, since a notch needs more."""
    trial = measure([script(SLEEPS), str(steps)], "sequential")
    assert not trial.error
    assert len(trial.steps_s) == 2
    assert trial.spread_s == pytest.approx(max(trial.steps_s) - min(trial.steps_s))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["2"], "the script ended after 2 steps; 3 are needed to time one"),
        (["0"], "the script ended after 0 steps; 3 are needed to time one"),
        (["6", "not enough for 7 processes"], "not enough for 7 processes"),
    ],
)
def test_a_script_that_fails_is_a_trial_with_its_last_words(script, arguments, error):
    trial = measure([script(SLEEPS), *arguments], "sequential")
    assert trial.error == error
    assert trial.step_s == float("inf")


HANGS = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
HANGS += "open(sys.argv[1], 'w').write(str(os.getpid()))\nwhile True: time.sleep(1)\n"


@pytest.mark.dear
def test_a_script_that_does_not_get_on_is_ended_whatever_it_ignores(script, tmp_path, monkeypatch):
    """The limit is over when the script hangs."""
    pid = tmp_path / "pid"

    class Popen(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout != 6.0:
                return super().wait(timeout)
            until(lambda: pid.exists() and pid.read_text(), 60)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(fresh_process.subprocess, "Popen", Popen)
    trial = measure([script(HANGS), str(pid)], "sequential", limit_s=6.0)
    assert trial.error == f"no {FEWEST_STEPS} steps within 6 s"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_an_interrupted_trial_leaves_no_process(script, tmp_path):
    """Ctrl-C in the measuring process, in the middle of a trial that would not end by itself."""
    command = [script(HANGS), str(tmp_path / "pid")]
    code = f"from paceline.planner.measure.trial import measure; measure({command!r}, 'threads:1')"
    planner = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 60)
    planner.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in planner.communicate(timeout=60)[1]
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


SHARES = """
import json, mmap, os, sys, time
from pathlib import Path
from paceline.planner.measure.stopwatch import Stopwatch
memory, size = mmap.mmap(-1, 64 << 20), 64 << 20
meet = [os.pipe() for _ in range(4)]
leader = os.fork() != 0
own = bytearray(b"x") * (32 << 20) if leader else b""
for start in range(0, size, 4096):
    memory[start] = 1
def together(i):
    os.write(meet[2 * i + leader][1], b".")
    os.read(meet[2 * i + (not leader)][0], 1)
together(0)
watch = Stopwatch(Path(sys.argv[1]) if leader else Path(sys.argv[1] + ".1"), leader, 0.1)
for _ in range(3):
    watch.tick(1, 0.01)
together(1)
watch.write()
if leader:
    os.wait()  # until both have written
"""


def test_memory_that_processes_share_is_counted_once(report, script):
    """Two processes on the same 64 MiB, one of them with 32 MiB of its own."""
    subprocess.run([sys.executable, script(SHARES), str(report)], check=True, timeout=60)
    peaks = [json.loads(path.read_text())["peak_bytes"] / 2**20 for path in (report, report.with_name("trial.json.1"))]
    assert 64 + 32 <= sum(peaks) < 64 + 32 + 60, "64 MiB were counted twice, or not at all"
    assert peaks[0] - peaks[1] > 24
