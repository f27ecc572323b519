"""Deadlines use monotonic clocks, not the wall clock, which may be set at any moment."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from outlived import BATCH, COUNT, EPOCHS

import paceline
from launching import HERE, environment
from paceline.checkpoint import checkpoint
from paceline.report.record import read

ROOT = Path(paceline.__file__).parent
WAITING = (
    "link",
    "exchange",
    "elastic",
    "engine",
    "launch",
    "checkpoint",
    "step",
    "data/load_balance.py",
    "training.py",
    "pace.py",
)
WALL = {"time", "time_ns", "ctime", "gmtime", "localtime", "now", "utcnow", "today"}
# allowed where two machines' clocks are compared
SPARED = {"launch/doctor/examine.py": "time", "launch/doctor/agent.py": "time"}


def wall_clocks(source):
    """(line, name) of every call of a wall clock: time.time(), datetime.now() and similar functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WALL:
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if owner in ("time", "datetime", "date"):
                yield node.lineno, node.func.attr
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in WALL)


def files():
    for name in WAITING:
        place = ROOT / name
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]


def test_deadlines_use_monotonic_clocks():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files()
        for line, name in wall_clocks(path.read_text())
        if SPARED.get(str(path.relative_to(ROOT))) != name
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("end = time.time() + 5", ["time"]),
        ("from time import time", ["time"]),
        ("import datetime\nend = datetime.datetime.now()", ["now"]),
        ("end = time.monotonic() + 5; time.sleep(1)", []),
    ],
)
def test_a_wall_clock_in_a_source_is_found(source, found):
    assert [name for _, name in wall_clocks(source)] == found


@pytest.mark.dear
def test_a_wall_clock_that_jumps_by_days_changes_nothing(tmp_path):
    """Two nodes, of which one fails: the other continues, saves, and finishes the training."""
    start = "import sys; from paceline.launch.local import start; "
    start += "sys.exit(start(sys.argv[1:], 'sequential', 2, min_nodes=1))"
    command = [sys.executable, "-c", start, sys.executable, str(HERE / "scripts" / "jumping.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (json.loads(path.read_text()) for path in tmp_path.glob("*-*.json"))
    assert len(result["losses"]) == checkpoint.read_newest(tmp_path).step == EPOCHS * math.ceil(COUNT / BATCH)
    dates = [event["time"] for event in read(tmp_path)]
    assert max(dates) - min(dates) > 1e8, "the clock did not jump, so nothing is tested"
