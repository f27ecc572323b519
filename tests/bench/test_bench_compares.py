"""Benchmarks: ratios within a round, fair contenders, nothing lost when one fails."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline_bench.result import Finding
from paceline_bench.single import one_machine
from paceline_bench.single.decode import decode
from paceline_bench.single.paired import Contender, PairedRun, Spread, Turn, fight
from paceline_bench.single.plan_search import Searched, Step, relative, seconds


def test_equal_rounds_have_no_spread():
    spread = Spread.of_ratios([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert spread.median == pytest.approx(2.0)
    assert spread.low == pytest.approx(2.0)
    assert spread.high == pytest.approx(2.0)


def test_interval_is_students():
    each = [1.0, 2.0, 3.0]
    spread = Spread.of(each)
    half = 2.920 * 1.0 / math.sqrt(3)  # t of 2 degrees, 90 % two-sided; deviation 1
    assert (spread.median, spread.low, spread.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half))


def test_a_slow_round_of_both_changes_no_ratio():
    one = Spread.of_ratios([2.0, 2.0, 20.0], [1.0, 1.0, 10.0])
    assert one.low == pytest.approx(one.high)


def test_memory_is_of_all_processes():
    duel = PairedRun("m", 1, {"a": [Turn(1, 0, 300, 200)], "b": [Turn(1, 0, 150, 50)]})
    assert duel.memory("a", "b") == 0.5
    assert duel.memory("a", "b", "pss_bytes") == 0.25


@pytest.mark.dear
def test_contenders_compute_the_same():
    ways = [Contender("torch", "torch:1"), Contender("ours", "paceline", "threads:1")]
    duel = fight("mlp", 32, ways, 1, (2, 2))
    plain, ours = (duel.turns[way.name][0] for way in ways)
    assert ours.loss == pytest.approx(plain.loss, rel=1e-5)
    assert min(plain.step_s, ours.step_s) > 0
    assert plain.peak_bytes >= plain.pss_bytes > 0


@pytest.mark.dear
def test_a_contender_that_fails_is_named():
    with pytest.raises(ValueError, match=r"'?mine'? failed on mlp with batch 32 \(exit code 2\)"):
        fight("mlp", 32, [Contender("torch", "torch"), Contender("mine", "paceline", "threads:none")], 1, (1, 1))


def test_what_was_found_stays_when_the_next_fails(monkeypatch, tmp_path):
    def first(rounds, show):
        yield Finding("first", "one", "1.0", ">= 1", True)

    def second(rounds, show):
        raise ValueError("no such thing")
        yield

    monkeypatch.setattr(one_machine, "TASKS", {"first": first, "second": second})
    result = CliRunner().invoke(app, ["bench", "local", "--out", str(tmp_path / "out")])
    assert result.exit_code != 0
    assert [one["what"] for one in json.loads((tmp_path / "out/raw.json").read_text())] == ["one"]


def test_unknown_task_is_said_before_any_runs():
    with pytest.raises(ValueError, match="no task named nothing; known: exact, ddp, factors"):
        next(iter(one_machine.run(["nothing"], 1, print)))


def steps(seconds: list[float], baseline_s: float = 2.0) -> list[Step]:
    return [Step(each, baseline_s) for each in seconds]


def test_search_compares_medians():
    predicted = {"sequential": [2.0], "threads:2": [1.1, 1.1, 9.0], "processes:2": [0.9], "replicas:2": []}
    measured = {
        "sequential": [2.0, 2.0, 9.0],
        "threads:2": [1.0, 1.0, 1.0],
        "processes:2": [0.8] * 3,
        "replicas:2": [1.7],
    }
    chosen = (("threads:2", 40.0), ("threads:2", 50.0))
    one = Searched(
        "m", 8, chosen, *({row: steps(each) for row, each in some.items()} for some in (predicted, measured))
    )
    for of in (seconds, relative):
        assert one.errors(of) == pytest.approx({"sequential": 0.0, "threads:2": 0.1, "processes:2": 0.125})
    assert one.best == "processes:2"
    assert "threads:2, chosen 2 times" in one.table()


def test_a_slow_machine_is_no_error_of_a_prediction_relative_to_the_baseline():
    one = Searched("m", 8, (), {"threads:2": steps([1.0])}, {"threads:2": steps([1.3], baseline_s=2.6)})
    assert one.errors(seconds)["threads:2"] == pytest.approx(1 / 1.3 - 1)
    assert one.errors(relative)["threads:2"] == pytest.approx(0.0)


def test_decode_races_all_three():
    (found,) = decode(1, lambda doing: None, count=8)
    assert found.details.count("images/s") == 1
    assert all(name in found.details for name in ("DataLoader, in process", "DataLoader, one process", "paceline"))
