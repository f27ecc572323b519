"""The choice is the fastest row, or a simpler one that cannot be told from it; every other row says why it lost."""

from __future__ import annotations

import os

import pytest

from paceline.find import parse
from paceline.plan import candidates, choose, make
from paceline.probe.trial import Trial

SEQUENTIAL = Trial("sequential", step_s=0.8, spread_s=0.01)
THREADS = Trial("threads:2", step_s=0.4, spread_s=0.01)
PROCESSES = Trial("processes:2", step_s=0.2, spread_s=0.01)
BROKEN = Trial("processes:4", error="paceline: out of memory")


def reasons(plan):
    return {row.trial.engine: row.reason for row in plan.rows}


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0)])
def test_the_choice_is_the_fastest_row(order):
    trials = [(SEQUENTIAL, THREADS, PROCESSES)[i] for i in order]
    plan = choose(trials)
    assert plan.engine == "processes:2"
    assert plan.reason == "fastest of 3 measured" + "; nothing parallel pays here" * (trials[0] is PROCESSES)
    assert reasons(plan) == {"sequential": "300% slower", "threads:2": "100% slower", "processes:2": "chosen"}


def test_every_row_is_kept_as_measured_in_the_order_tried():
    trials = (SEQUENTIAL, BROKEN, THREADS, PROCESSES)
    assert tuple(row.trial for row in choose(trials).rows) == trials


def test_speedup_is_over_the_first_that_ran():
    assert [row.speedup for row in choose([SEQUENTIAL, THREADS, PROCESSES]).rows] == pytest.approx([1, 2, 4])
    assert [row.speedup for row in choose([BROKEN, THREADS, SEQUENTIAL]).rows] == pytest.approx([0, 1, 0.5])


@pytest.mark.parametrize("faster_s", [0.79, 0.80, 0.81])
def test_within_the_spread_the_earlier_row_wins_and_the_later_is_called_equal(faster_s):
    near = Trial("threads:2", step_s=faster_s, spread_s=0.01)
    plan = choose([SEQUENTIAL, near])
    assert plan.engine == "sequential"
    assert reasons(plan) == {"sequential": "chosen", "threads:2": "equal within the spread"}
    assert "nothing parallel pays here" in plan.reason
    assert ("as fast as any, and simpler" in plan.reason) == (faster_s < 0.8)


def test_beyond_the_spread_the_faster_row_wins_although_it_is_not_simpler():
    plan = choose([SEQUENTIAL, Trial("threads:2", step_s=0.77, spread_s=0.01)])
    assert plan.engine == "threads:2"
    assert reasons(plan) == {"sequential": "4% slower", "threads:2": "chosen"}
    assert "nothing parallel" not in plan.reason


def test_a_tie_away_from_the_baseline_goes_to_the_earlier_row_too():
    plan = choose([SEQUENTIAL, THREADS, Trial("processes:2", step_s=0.39, spread_s=0.01)])
    assert plan.engine == "threads:2"
    assert plan.reason == "as fast as any, and simpler"
    assert reasons(plan)["processes:2"] == "equal within the spread"
    assert reasons(plan)["sequential"] == "100% slower"


def test_noise_is_no_merit():
    """A row five times slower, though it may once have been as fast, is not chosen, nor are others "-80% slower"."""
    noisy = Trial("sequential", step_s=1.0, spread_s=0.95)
    plan = choose([noisy, Trial("threads:2", step_s=0.1, spread_s=0.01), Trial("processes:2", step_s=0.2)])
    assert plan.engine == "threads:2"
    assert not [reason for reason in reasons(plan).values() if reason.startswith("-")]


def test_failures_are_kept_with_their_error_and_never_chosen():
    plan = choose([SEQUENTIAL, BROKEN])
    assert plan.engine == "sequential"
    assert reasons(plan)["processes:4"] == "failed: paceline: out of memory"
    assert [row.speedup for row in plan.rows] == [1.0, 0.0]


def test_when_nothing_ran_the_first_error_says_why():
    with pytest.raises(ValueError, match="no candidate could be run; processes:4: paceline: out of memory"):
        choose([BROKEN, Trial("threads:2", error="something else")])


def test_candidates_exist_with_the_baseline_first_and_fit_the_cores(monkeypatch):
    for cores in (1, 2, 3, 4, 16):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        found = candidates()
        assert found[0] == "sequential"
        assert len(set(found)) == len(found)
        assert (len(found) > 1) == (cores > 1)
        for text in found:
            assert parse("engine", text)
            assert int(text.partition(":")[2] or 1) <= cores


def test_making_a_plan_tries_every_candidate_in_order_and_shows_each(monkeypatch):
    tried, shown = [], []

    def measure(command, engine):
        assert not shown or shown[-1].engine == tried[-1][1]
        tried.append((command, engine))
        return Trial(engine, step_s=1 / len(tried), spread_s=0.001)

    monkeypatch.setattr("paceline.plan.measure", measure)
    monkeypatch.setattr("paceline.plan.candidates", lambda: ["sequential", "threads:2", "processes:2"])
    plan = make(["script.py", "--fast"], shown.append)
    assert tried == [(["script.py", "--fast"], engine) for engine in ("sequential", "threads:2", "processes:2")]
    assert plan.engine == "processes:2"
    assert [row.trial for row in plan.rows] == shown
