"""One line for each class of fault: how often, how long, at what price; and the record of it."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from paceline.launch.machine import survey
from paceline_bench.chaos.fault_run import HANG_S, Outcome
from paceline_bench.chaos.faults import CLASSES, ENDING

HEAD = (
    "| fault | count | recovery p50, s | p99, s | steps again: median, most | wrong | hangs over "
    f"{HANG_S:.0f} s | ended the run |\n|---|---|---|---|---|---|---|---|"
)


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest of them that is as large as ``part`` of all."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def table(outcomes: Sequence[Outcome]) -> str:
    kinds = [kind for kind in CLASSES if any(one.fault.kind == kind for one in outcomes)]
    rows = [_row(kind, [one for one in outcomes if one.fault.kind == kind]) for kind in kinds]
    going = [one for one in outcomes if one.fault.kind not in ENDING]
    rows += [_row("all that a run outlives", going)] if going else []
    ways = sorted({one.way for one in outcomes})
    rows += [_row(f"with {way}", [one for one in outcomes if one.way == way]) for way in ways if len(ways) > 1]
    rows += [_row("all", outcomes)] if len(going) < len(outcomes) else []
    return "\n".join([HEAD, *rows])


def _row(name: str, some: Sequence[Outcome]) -> str:
    seconds = [one.recovery_s for one in some if one.recovery_s is not None]
    half, most = (f"{quantile(seconds, part):.2f}" if seconds else "-" for part in (0.5, 0.99))
    again = [one.lost for one in some]
    words = (
        *(name, len(some), half, most, f"{statistics.median(again):g}, {max(again)}"),
        *(sum(bool(one.wrong) for one in some), sum(bool(one.hung) for one in some)),
        sum(bool(one.ended) for one in some),
    )
    return f"| {' | '.join(map(str, words))} |"


def failed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.wrong or one.hung or one.ended]


def record(folder: Path, outcomes: Sequence[Outcome], trainings: int, command: str, seconds: float) -> None:
    """README.md for people, raw.json with every fault."""
    machine = survey()
    bad = "\n".join(f"- {one}" for one in failed(outcomes)) or "Nothing was wrong, nothing hung, no run ended."
    text = f"""# Real faults: {len(outcomes)} in {trainings} trainings, {len(failed(outcomes))} not as they should be

Nodes are network namespaces on a bridge, each with its sshd; the runs were started by `paceline run --detach -H
node0,... --nodes 2:N` and went on over gloo. A small network with factors and batch norm over everyone, in float64,
steps of some 50 ms, a checkpoint every 20 steps. At random moments a random fault; where too few nodes are left, all
are killed, and the run is started again on another number of nodes, with another engine.

{table(outcomes)}

Recovery: the time without a step on those who are left, from the fault on where it may cost the run a node, else the
longest pause that begins after it; of what ends a run (the last class), until the next start, with Python's and
torch's own, has got further than the one before. Short ones are weathered (a stop or a broken cable of up to 2.5 s),
long ones last 12.5 to 14 s, a third of the stops 20 to 30 s. {sum(one.back for one in outcomes)} times a node that had
been lost was back, and trained, before the next fault. Steps again: computed once more. Wrong: a row of a batch that
was computed twice or not at all, replicas that differ by a bit after any step, a loss or last weight more than 1e-9
from plain PyTorch's in one process.

{bad}

**Environment.** {machine.cpu}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}, Python
{platform.python_version()}, torch {torch.__version__}; {seconds:.0f} s.

**Command**: `{command}`, as root. A seed gives the faults and their moments; how far the training is then, the machine
decides.
"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(text)
    (folder / "raw.json").write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
