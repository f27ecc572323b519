"""A plan is written and read without loss; a wrong file is told what is wrong, where, and what would be right."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from paceline.planner.plan_file import Plan, Row
from paceline.planner.plan_tables import plan_table

FULL = Plan(
    "threads:2+channels_last",
    "fastest of 2 measured",
    (
        Row("sequential", 0.5, 0.52, 0.01, 61.5, 1.0, 1 << 30, "exact", True, 4, "100% slower (± 4%)"),
        Row(
            "threads:2+channels_last",
            0.25,
            0.26,
            0.005,
            123.0,
            2.0,
            1 << 30,
            "exact, local BN",
            steps=9,
            reason="chosen",
        ),
        Row("processes:2", reason="out of memory: needs 99.0 of 8.0 GiB"),
    ),
    32,
    "exact",
    "0123456789abcdef",
    "2026-11-21T07:30:24Z",
    {"cores": 2, "flags": ["avx2"], "compiler": True},
    {"torch": "2.13.0"},
)


@pytest.mark.parametrize("plan", [FULL, Plan("sequential")], ids=["full", "least"])
def test_what_is_written_is_read(plan, tmp_path):
    plan.write(tmp_path / "plan.toml")
    assert Plan.read(tmp_path / "plan.toml") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"], "something was left beside the file"


def test_the_choice_alone_is_a_plan():
    assert Plan.from_toml('chosen = "processes:2"') == Plan("processes:2")


def test_json_has_the_documented_keys():
    told = json.loads(FULL.to_json())
    assert {"version", "chosen", "reason", "rows", "batch_size", "fidelity", "fingerprint"} <= told.keys()
    for row in told["rows"]:
        assert {"engine", "predicted_s", "measured_s", "speedup", "fidelity", "reason"} <= row.keys()
    assert told["rows"][2]["measured_s"] is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "lacks 'chosen', the configuration to use, as in: chosen = \"threads:2\""),
        ("chosen = [", "is not TOML: .*paceline plan --out FILE"),
        ("chosen = 2", "'chosen' must be a string, got 2"),
        ('chosen = "threads:2"\nversion = 7', "has version 7, this paceline reads 1; make a new plan"),
        ('chosen = "threads:2"\nbatchsize = 7', "unknown key 'batchsize' .did you mean 'batch_size'"),
        (
            'chosen = "threads:2"\nzzz = 1\nbatch_size = true',
            "unknown key 'zzz' .known: chosen, .*'batch_size' must be a whole",
        ),
        ('chosen = "threads:2+fast"', ": bf16, fp16, channels_last, fused, compile; unknown: fast"),
        ('chosen = "threads:x"', "configuration 'threads:x' is not of the form"),
        ('chosen = "threads"\n[[rows]]\nmeasured_s = "1"', r"rows\[0\]: 'measured_s' must be a number, got '1'"),
        ('chosen = "threads"\n[[rows]]\nmeasured_s = 1', r"rows\[0\] lacks 'engine'"),
        ('chosen = "threads"\n[rows]\nx = 1', "'rows' must be an array of tables"),
        ('chosen = "threads"\nhosts = { b = 4 }', "'hosts' must hold strings, got b = 4"),
        ('chosen = "threads"\nrows = [1]', r"rows\[0\] must be a table, got 1"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(text, told, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=told) as raised:
        Plan.read(tmp_path / "mine.toml")
    assert "mine.toml" in str(raised.value) or "configuration '" in str(raised.value)


def test_no_file_is_told_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the plan .*none\.toml"):
        Plan.read(tmp_path / "none.toml")


def test_the_table_shows_prediction_beside_measurement_and_leaves_empty_columns_out():
    page = Console(file=io.StringIO(), width=60, soft_wrap=True)
    page.print(plan_table(FULL))
    said = page.file.getvalue()
    assert "~0.5200 ± 0.0100" in said, "an extrapolated row is marked"
    for word in ("predicted", "0.2500", "0.2600", "2.00x", "1024 MiB", "exact, local BN", "<- chosen", "out of memory"):
        assert word in said
    page = Console(file=io.StringIO(), width=200)
    page.print(plan_table(Plan("sequential", rows=(Row("sequential", reason="chosen"),))))
    assert "memory" not in page.file.getvalue()


def test_an_error_that_looks_like_markup_is_shown_as_it_is():
    page = Console(file=io.StringIO(), width=60, soft_wrap=True)
    page.print(plan_table(Plan("sequential", rows=(Row("sequential", reason="failed: of the form name[:k][/inner]"),))))
    assert "name[:k][/inner]" in page.file.getvalue()
