"""The choice is the fastest row, or a simpler one that cannot be told from it; every other row says why it lost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from paceline.launch.machine import Machine
from paceline.planner import planner
from paceline.planner.candidates import JobFacts
from paceline.planner.choose import Candidate, choose, correct, speedup, tied
from paceline.planner.measure import fresh_process, stopwatch, trial
from paceline.planner.measure.profile import Profile
from paceline.planner.measure.trial import Trial, merge
from paceline.planner.plan_tables import plan_table

pytestmark = pytest.mark.long


def tried(engine, step_s, spread_s=0.01, **more):
    return Candidate(engine, trial=Trial(engine, step_s, spread_s, **more))


SEQUENTIAL, THREADS, PROCESSES = tried("sequential", 0.8), tried("threads:2", 0.4), tried("processes:2", 0.2)
BROKEN = Candidate("processes:4", trial=Trial("processes:4", error="RuntimeError: no such thing"))


def reasons(candidates, level="exact"):
    return {row.engine: row.reason for row in choose(candidates, level)[2]}


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0)])
def test_the_choice_is_the_fastest_row(order):
    candidates = [(SEQUENTIAL, THREADS, PROCESSES)[i] for i in order]
    chosen, reason, rows = choose(candidates)
    assert chosen == "processes:2"
    assert reason == "fastest of 3 measured"
    assert [row.engine for row in rows] == [one.engine for one in candidates]
    assert reasons(candidates) == {
        "sequential": "300% slower (± 10%)",
        "threads:2": "100% slower (± 10%)",
        "processes:2": "chosen",
    }


def test_a_single_measurement_says_whether_time_or_the_others_were_why():
    left, refused = Candidate("threads:4", 0.5), Candidate("pipeline:2", refusal="refused: no place")
    alone, unsure = "the only one that ran", "the most promising, and the only one that there was time to measure"
    assert choose([SEQUENTIAL, BROKEN, refused])[1] == alone
    assert choose([SEQUENTIAL, left, refused])[1] == unsure
    assert choose([SEQUENTIAL, Candidate("sequential+bf16", 0.5)])[1] == alone  # which is not allowed
    assert reasons([SEQUENTIAL, refused])["pipeline:2"] == "refused: no place"


@pytest.mark.parametrize(("parallel_s", "said"), [(0.4, False), (1.6, True)])
def test_nothing_parallel_pays_where_the_baseline_wins_in_whatever_order_rows_are_given(parallel_s, said):
    for order in (1, -1):
        reason = choose([SEQUENTIAL, tried("threads:2", parallel_s)][::order])[1]
        assert ("sequential execution is fastest here" in reason) == said


def test_speedup_is_over_the_first_row_by_measurement_where_both_have_one():
    rows = choose([SEQUENTIAL, THREADS, PROCESSES])[2]
    assert [row.speedup for row in rows] == pytest.approx([1, 2, 4])
    half = Candidate("threads:2", predicted_s=0.5)
    base = Candidate("sequential", 1.0, Trial("sequential", 0.8, 0.01))
    correct([base, half])
    assert [row.speedup for row in choose([base, half])[2]] == pytest.approx([1, 2])
    assert choose([base, Candidate("threads:2")])[2][1].speedup is None


@pytest.mark.parametrize("near_s", [0.79, 0.80, 0.81])
def test_within_the_spread_the_earlier_row_wins_and_the_later_is_called_equal(near_s):
    for names in (("sequential", "threads:2"), ("threads:2", "sequential")):
        candidates = [tried(names[0], 0.80), tried(names[1], near_s)]
        assert choose(candidates)[0] == names[0]
        assert reasons(candidates) == {names[0]: "chosen", names[1]: "equal within the spread"}
        assert ("as fast as any, and simpler" in choose(candidates)[1]) == (near_s < 0.8)


def test_the_same_row_twice_is_a_tie_whatever_it_is_called():
    """Two starts of one program differ by a per cent or two with spreads far smaller: that is no difference."""
    for first_s, second_s in ((0.500, 0.507), (0.507, 0.500)):
        candidates = [tried("threads:2", first_s, 1e-4), tried("processes:2", second_s, 1e-4)]
        assert reasons(candidates)["processes:2"] == "equal within the spread"
        assert reasons(candidates[::-1])["threads:2"] == "equal within the spread"


def test_what_noise_may_hide_is_not_given_away_for_simplicity():
    """Three steps of a large model, each some seconds long, may differ by a third."""
    candidates = [tried("threads:2", 3.6, 1.0), tried("replicas:2", 2.7, 1.0), tried("processes:2", 2.6, 1.0)]
    assert reasons(candidates) == {
        "threads:2": "equal within the spread",
        "replicas:2": "chosen",
        "processes:2": "equal within the spread",
    }


def test_of_rows_predicted_alike_the_simpler_is_tried_first():
    """It may be the one row that there is time for."""
    seconds = {"sequential": 1.0, "processes:2+channels_last": 0.499, "threads:2+channels_last": 0.5, "threads:2": 0.51}
    rows = [Candidate(name, predicted_s=each) for name, each in seconds.items()]
    order = [one.engine for one in planner._worth_trying(rows, "exact", thorough=False)]
    assert order == ["sequential", "threads:2", "threads:2+channels_last", "processes:2+channels_last"]
    rows[1].predicted_s = 0.4
    assert planner._worth_trying(rows, "exact", thorough=False)[1] is rows[1]


def test_no_prediction_forbids_everything():
    """Memory is predicted roughly, and what is there decides."""
    rows = [Candidate("sequential", refusal="out of memory"), Candidate("threads:2", refusal="out of memory")]
    assert [one.engine for one in planner._worth_trying(rows, "exact", thorough=False)] == ["sequential"]
    assert not rows[0].refusal


def test_rows_beyond_the_fidelity_are_told_before_anything_is_measured():
    with pytest.raises(ValueError, match=r"--rows threads:2\+bf16: none is exact; add --fidelity rounded"):
        planner.make(["no script is started"], rows=["threads:2+bf16"])


@pytest.mark.parametrize("steps_s", [[0.4, 1.0, 0.4], [0.4, 1.0, 0.4, 1.0], [1.0, 0.4, 1.1, 0.4, 0.9]])
def test_a_short_last_batch_says_nothing_of_whole_ones(steps_s, tmp_path):
    """Story: of two steps per epoch, one of 64 rows and one of 16, chance decided which was reported."""
    report = tmp_path / "report"
    samples = [16.0 if seconds == 0.4 else 64.0 for seconds in steps_s]
    said = {"steps_s": steps_s, "samples": samples, "num_steps": len(steps_s), "rows": 64, "peak_bytes": 1}
    report.write_text(json.dumps(said))
    found = trial.result_of("sequential", fresh_process.ProcessResult(0, ""), report, 10.0)
    assert (found.step_s, found.per_s) == (1.0, 64.0)


def test_beyond_the_spread_the_faster_row_wins_although_it_is_not_simpler():
    assert choose([SEQUENTIAL, tried("threads:2", 0.77)])[0] == "threads:2"


@pytest.mark.parametrize("division", ["slices", "whole tensors"])
def test_rows_of_processes_say_how_the_optimizer_is_divided(division):
    plan_ = planner.Plan("processes:2", rows=choose([SEQUENTIAL, PROCESSES], facts=JobFacts(division=division))[2])
    assert [row.optimizer for row in plan_.rows] == ["", division]
    assert planner.Plan.from_toml(plan_.to_toml()).rows == plan_.rows
    assert division in "".join(map(str, plan_table(plan_).columns[-2]._cells))


def test_noise_is_no_merit():
    """A row five times slower, though it may once have been as fast, is not chosen, nor are others "-80% slower"."""
    candidates = [tried("sequential", 1.0, 0.95), tried("threads:2", 0.1), tried("processes:2", 0.2, 0.0)]
    assert choose(candidates)[0] == "threads:2"
    assert not [reason for reason in reasons(candidates).values() if reason.startswith("-")]


def test_failures_and_refusals_are_kept_with_their_reason_and_never_chosen():
    big = Candidate("replicas:2", 0.01, refusal="out of memory: needs 99.0 of 8.0 GiB")
    full = Candidate("processes:2", trial=Trial("processes:2", error="RuntimeError: can't allocate memory: 9 bytes"))
    candidates = [SEQUENTIAL, BROKEN, big, full]
    assert choose(candidates)[0] == "sequential"
    assert reasons(candidates) == {
        "sequential": "chosen",
        "processes:4": "failed: RuntimeError: no such thing",
        "replicas:2": "out of memory: needs 99.0 of 8.0 GiB",
        "processes:2": "out of memory: RuntimeError: can't allocate memory: 9 bytes",
    }
    assert choose(candidates)[2][1].measured_s is None


def test_what_is_faster_but_not_allowed_is_shown_with_its_gain_and_not_taken():
    rounded = Candidate("threads:2+bf16", 0.2, Trial("threads:2+bf16", 0.2, 0.001))
    guessed = Candidate("sequential+bf16", 0.4)
    base = Candidate("sequential", 0.8, Trial("sequential", 0.8, 0.001))
    told = reasons([base, guessed, rounded])
    assert choose([base, guessed, rounded])[0] == "sequential"
    assert told["threads:2+bf16"] == "not exact: would be 4.00x, --fidelity rounded allows it"
    assert told["sequential+bf16"] == "not exact: would be about 2.00x, --fidelity rounded allows it"
    assert choose([base, guessed, rounded], "rounded")[0] == "threads:2+bf16"


def test_predictions_of_rows_not_run_are_as_far_off_as_those_that_ran():
    """By their median: one that was interrupted says nothing. What ran keeps what was predicted of it."""
    rows = [
        Candidate("sequential", 1.0, Trial("sequential", 0.8, 0.01)),
        Candidate("threads:2", 0.5, Trial("threads:2", 0.45, 0.01)),
        Candidate("replicas:2", 0.5, Trial("replicas:2", 5.0, 0.01)),
        Candidate("processes:2", 0.6, Trial("processes:2", error="RuntimeError: no such thing")),
        Candidate("pipeline:2", 0.7),
        Candidate("pipeline:4"),
    ]
    correct(rows)
    assert [one.predicted_s for one in rows] == [1.0, 0.5, 0.5, pytest.approx(0.54), pytest.approx(0.63), None]
    told = {row.engine: row for row in choose(rows)[2]}
    assert told["pipeline:2"].speedup == pytest.approx(0.8 / 0.63)
    assert told["pipeline:2"].reason == "not tried: predicted 40% slower"
    only = [Candidate("threads:2", 0.5)]
    correct(only)
    assert only[0].predicted_s == 0.5


def test_what_was_not_tried_says_what_was_predicted():
    best = Candidate("threads:2", 0.4, Trial("threads:2", 0.4, 0.001))
    told = reasons([best, Candidate("sequential", 0.8), Candidate("processes:2", 0.3), Candidate("replicas:2")])
    assert told["sequential"] == "not tried: predicted 100% slower"
    assert told["processes:2"] == told["replicas:2"] == "not tried: no time left"


def test_when_nothing_ran_the_first_error_says_why():
    with pytest.raises(ValueError, match="no candidate could be run; processes:4: RuntimeError: no such thing"):
        choose([BROKEN, Candidate("threads:2", trial=Trial("threads:2", error="something else"))])


def test_without_time_to_try_any_the_prediction_chooses():
    rows = [Candidate("sequential", 0.8), Candidate("threads:2", 0.5), Candidate("processes:2", 0.4), BROKEN]
    chosen, reason, told = choose([*rows, Candidate("threads:2+bf16", 0.1)])
    assert (chosen, reason) == ("processes:2", "fastest as predicted; the budget left no time to try any")
    assert [row.measured_s for row in told] == [None] * 5
    assert [row.speedup for row in told[:3]] == [1.0, 1.6, 2.0]


def test_a_budget_is_a_bound_where_steps_are_predicted(sleeps):
    """The script's steps take for ever; the trial ends with the budget, and its row has not lost by that."""
    budget = planner._Budget(time.monotonic(), 3.0, thorough=False, start_s=0.5)
    slow, quick = Candidate("sequential", 10.0), Candidate("threads:2", 0.1)
    assert not budget.allows(slow, [slow, quick], "exact")
    assert budget.allows(quick, [slow, quick], "exact")
    quick.trial = budget.trial([*sleeps, "60"], quick)
    assert quick.trial is None
    assert budget.left_s <= 0
    assert not budget.allows(quick, [slow, quick], "exact")


def test_timing_again_makes_a_median_and_what_differs_between_starts_is_spread():
    starts = [Trial("threads:2", step_s, 0.001, 8 / step_s, 10, steps_s=(step_s,) * 3) for step_s in (0.10, 0.13, 0.11)]
    both = merge(starts)
    assert both.step_s == 0.11
    assert both.spread_s == pytest.approx(0.015)
    assert both.per_s == pytest.approx(8 / 0.11)
    assert len(both.steps_s) == 9
    assert merge(starts[:1]) is starts[0]
    assert merge([starts[0], BROKEN.trial]).error
    assert not tied(starts[0], Trial("sequential", 0.2, 0.001))


SLEEPS = """
import os, sys, time
from paceline.planner.measure.stopwatch import Stopwatch
if "PACELINE_PROFILE" in os.environ:
    sys.exit(0)
with open(sys.argv[1], "a") as log:
    print(os.environ["PACELINE_ENGINE"], file=log)
now_s = 0.0
time.perf_counter = lambda: now_s  # a step takes what it says, however busy the machine: equal rows are equal
watch = Stopwatch.of_environment(leader=True)
while True:
    step_s = {"sequential": 0.08, "threads:2": 0.02, "threads:1": 0.02}[os.environ["PACELINE_ENGINE"]]
    time.sleep(float(sys.argv[2]) if sys.argv[2:] else step_s)
    now_s += step_s
    watch.tick(8, 0.1)
"""


@pytest.fixture
def sleeps(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS)
    return [str(script), str(tmp_path / "log")]


@pytest.mark.dear
def test_a_plan_of_a_command_whose_parts_cannot_be_timed_tries_rows_as_they_come(sleeps, tmp_path):
    """In real processes. The two equal rows are timed again by turns, stay a tie, and the earlier is chosen."""
    shown = []
    made = planner.make(sleeps, budget_s=12, rows=["sequential", "threads:2", "threads:1"], show=shown.append)
    assert made.chosen == "threads:2"
    assert [row.engine for row in made.rows] == ["sequential", "threads:2", "threads:1"]
    assert made.rows[0].measured_s == pytest.approx(0.08)
    assert made.rows[2].reason in ("equal within the spread", "not tried: no time left")
    order = (tmp_path / "log").read_text().split()
    assert order[0] == "sequential"
    assert set(order[3:]) <= {"threads:1", "threads:2"}
    assert shown[0] == "profiling"


def test_without_a_profile_no_row_is_left_out(monkeypatch):
    """How many rows a batch has, nobody knows then."""
    monkeypatch.setattr(planner, "run_profile", lambda *_: (None, "the first step was not reached in time"))
    monkeypatch.setattr(planner, "measure", lambda command, engine, **_: Trial(engine, 0.1, 0.01))
    monkeypatch.setattr(planner, "survey", lambda: Machine(cores=4, physical_cores=4, memory_bytes=64 << 30))
    rows = [row.engine for row in planner.make(["x.py"]).rows]
    assert rows == ["sequential", "threads:4", "replicas:4", "replicas:2", "processes:4", "processes:2"]


def test_all_rows_that_promise_as_much_share_the_minute(monkeypatch):
    """Story: of a transformer one parallel row was tried, the one that predictions of equal rows put first by chance.

    Steps of 1.5 s and 0.75 s; a start takes 5 s, the profile 10 s.
    """
    now_s, ran = [0.0], []
    found_s = {"sequential": 1.5, "threads:2": 0.9, "replicas:2": 0.8, "processes:2": 0.75, "pipeline:2": 1.1}
    said_s = {**found_s, "threads:2": 0.73, "replicas:2": 0.74, "processes:2": 0.76}

    def profile(*_):
        now_s[0] += 15.0
        return Profile(JobFacts(rows=16), spent_s=10.0), ""

    def measure(command, engine, timed_s, limit_s, shrinks):
        ran.append(engine)
        step_s = found_s[engine] * (0.4 if shrinks else 1.0)
        watch = stopwatch.Stopwatch(None, timed_s=timed_s, shrinks=shrinks)
        with contextlib.suppress(SystemExit):
            for _ in range(1000):
                now_s[0] += step_s
                watch.tick(16, step_s)
        now_s[0] += 5.0
        return Trial(engine, found_s[engine], 0.01, extrapolated=shrinks)

    clock = SimpleNamespace(monotonic=lambda: now_s[0], strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(planner, "time", clock)
    monkeypatch.setattr(planner, "run_profile", profile)
    monkeypatch.setattr(planner, "measure", measure)
    monkeypatch.setattr(planner, "predicted_s", lambda name, *_: said_s[name])
    monkeypatch.setattr(planner, "survey", lambda: Machine(cores=2, physical_cores=2, memory_bytes=64 << 30))
    monkeypatch.setattr(planner, "by_fingerprint", lambda *_: None)
    monkeypatch.setattr(planner, "store", lambda *_: None)
    made = planner.make(["x.py"], patient=True)
    assert made.chosen == "processes:2"
    assert ran[:4] == ["sequential", "threads:2", "replicas:2", "processes:2"]
    assert "pipeline:2" not in ran, "it was predicted far slower"
    assert now_s[0] <= 60.0 + 5.0


def test_a_script_that_fails_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = tmp_path / "fails.py"
    script.write_text("raise KeyError('the dataset')")
    with pytest.raises(ValueError, match="no candidate could be run: KeyError: 'the dataset'"):
        planner.make([str(script)])


def test_planning_does_not_import_torch():
    """A cached plan starts training at once: torch is imported where it trains, and only there."""
    code = (
        "import sys, json; from paceline.planner import planner; planner.survey(); planner.cached(['x.py'], 'exact');"
        "print(json.dumps([name for name in sys.modules if name == 'torch' or name.startswith('torch.')]))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert json.loads(said.stdout) == []


@pytest.mark.dear
def test_rows_that_fail_do_not_end_the_search(sleeps, monkeypatch):
    """Two rows of three fail at once: the third is still tried, and chosen."""
    made = planner.make(sleeps, budget_s=0.1, rows=["sequential", "threads:4", "processes:2+fused", "threads:2"])
    assert made.chosen == "threads:2"
    assert [row.reason.partition(":")[0] for row in made.rows][1:3] == ["failed", "failed"]


@pytest.mark.parametrize(
    ("options", "told"), [({"fidelity": "fair"}, "fidelity must be one"), ({"rows": ["x+y"]}, "configuration")]
)
def test_what_cannot_be_planned_is_told_before_anything_is_started(options, told):
    with pytest.raises(ValueError, match=told):
        planner.make(["no-such-script.py"], **options)


def test_where_the_baseline_was_not_run_speedups_are_still_in_the_order_of_seconds():

    base = Candidate("sequential", predicted_s=0.010)
    fast, slow = (
        Candidate("processes:2", predicted_s=0.0046, trial=Trial("processes:2", 0.005)),
        Candidate("threads:2", predicted_s=0.0044, trial=Trial("threads:2", 0.008)),
    )
    assert speedup(fast, base) == pytest.approx(2.0)
    assert speedup(slow, base) == pytest.approx(1.25)
