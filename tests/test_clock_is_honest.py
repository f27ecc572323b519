"""What is reported is what the steps took: warm-up left out, the same last step on every process."""

from __future__ import annotations

import json
import statistics
import time

import pytest

from paceline.probe.trial import MAX_STEPS, MIN_STEPS, TIMED_S, WARM_UP_STEPS, Stopwatch, measure

SLEEP_S = 0.01
ENOUGH_S = TIMED_S  # agreed seconds per step for which MIN_STEPS steps are enough


def tick_until_stopped(watch, agreed_s, work=lambda step: None, samples=4):
    """The number of steps until the watch ends the process."""
    steps = []

    def train():
        for step in range(1000):
            steps.append(step)
            work(step)
            watch.tick(samples, agreed_s(step) if callable(agreed_s) else agreed_s)

    with pytest.raises(SystemExit) as end:
        train()
    assert end.value.code == 0
    return len(steps)


@pytest.fixture
def report(tmp_path):
    return tmp_path / "trial.json"


def test_a_sleeping_step_is_measured_as_it_sleeps(report):
    """The warm-up sleeps ten times longer, and must not be seen."""
    watch = Stopwatch(report)
    tick_until_stopped(watch, ENOUGH_S, lambda step: time.sleep(SLEEP_S * (10 if step < WARM_UP_STEPS else 1)))
    steps_s = json.loads(report.read_text())["steps_s"]
    assert SLEEP_S <= statistics.median(steps_s) < 3 * SLEEP_S
    assert min(steps_s) >= SLEEP_S
    assert max(steps_s) < 10 * SLEEP_S


def test_steps_and_samples_of_the_warm_up_are_not_counted(report):
    steps = tick_until_stopped(Stopwatch(report), ENOUGH_S, samples=4)
    said = json.loads(report.read_text())
    assert steps == WARM_UP_STEPS + MIN_STEPS
    assert len(said["steps_s"]) == MIN_STEPS
    assert said["samples"] == 4 * MIN_STEPS
    assert said["peak_bytes"] > 2**20


def test_a_pause_between_steps_is_not_a_step(report):
    """Evaluating or saving takes time, too; after it the next step is counted anew."""
    watch = Stopwatch(report)

    def work(step):
        time.sleep(10 * SLEEP_S)
        watch.resume()
        time.sleep(SLEEP_S)

    tick_until_stopped(watch, ENOUGH_S, work)
    steps_s = json.loads(report.read_text())["steps_s"]
    assert SLEEP_S <= statistics.median(steps_s) < 3 * SLEEP_S


@pytest.mark.parametrize("wanted", [1, 4, 8, 16, 128, 1024])
def test_it_ends_when_the_agreed_time_is_enough_but_not_before_or_after_the_limits(wanted):
    """Powers of two, so that this many steps add up to the time wanted without rounding."""
    assert MIN_STEPS > 4
    assert 128 < MAX_STEPS < 1024
    steps = tick_until_stopped(Stopwatch(None), TIMED_S / wanted)
    assert steps - WARM_UP_STEPS == min(MAX_STEPS, max(MIN_STEPS, wanted))


def test_processes_with_different_clocks_stop_at_the_same_step(report):
    """Both are told the same agreed seconds; what their own clocks say is three times apart."""
    leader, follower = Stopwatch(report), Stopwatch(None)
    stopped = [
        tick_until_stopped(watch, lambda step: 0.05 * (1 + step % 3), lambda _, nap_s=nap_s: time.sleep(nap_s))
        for watch, nap_s in ((leader, SLEEP_S / 2), (follower, 3 * SLEEP_S / 2))
    ]
    assert stopped[0] == stopped[1]
    assert WARM_UP_STEPS + MIN_STEPS < stopped[0] < WARM_UP_STEPS + MAX_STEPS
    assert statistics.median(follower.steps_s) > 1.5 * statistics.median(leader.steps_s)


def test_only_the_leader_reports(monkeypatch, report):
    monkeypatch.setenv("PACELINE_TRIAL", str(report))
    tick_until_stopped(Stopwatch.of_environment(leader=False), ENOUGH_S)
    assert not report.exists()
    tick_until_stopped(Stopwatch.of_environment(leader=True), ENOUGH_S)
    assert list(report.parent.iterdir()) == [report], "a half-written file was left"


def test_without_a_trial_there_is_no_clock(monkeypatch):
    monkeypatch.delenv("PACELINE_TRIAL", raising=False)
    assert Stopwatch.of_environment(leader=True) is None


def test_a_sleeping_script_is_measured_as_it_sleeps(tmp_path):
    """Through the command, in a process of its own: median, middle half, samples per second."""
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import time\n"
        "from paceline.probe.trial import Stopwatch\n"
        "watch = Stopwatch.of_environment(leader=True)\n"
        "for step in range(1000):\n"
        f"    time.sleep({SLEEP_S} * (1 + step % 2))\n"
        "    watch.tick(8, 0.1)\n"
    )
    trial = measure([str(script)], "sequential")
    assert not trial.error
    assert SLEEP_S <= trial.step_s < 6 * SLEEP_S
    assert trial.step_s == statistics.median(trial.steps_s)
    assert trial.per_s == pytest.approx(8 / trial.step_s)
    assert SLEEP_S / 8 < trial.spread_s < 3 * SLEEP_S  # every other step is twice as long


def test_a_script_that_fails_is_a_trial_with_its_last_words(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise MemoryError('not enough for 7 processes')")
    trial = measure([str(script)], "sequential")
    assert trial.error == "MemoryError: not enough for 7 processes"
    assert trial.step_s == float("inf")


def test_a_script_that_does_not_get_on_is_a_trial_that_says_for_how_long(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text("import time; time.sleep(60)")
    start = time.monotonic()
    trial = measure([str(script)], "sequential", limit_s=4.0)
    assert trial.error == f"no {MIN_STEPS} steps within 4 s"
    assert time.monotonic() - start < 20
