"""Several machines against their peers: PyTorch's DDP by hand and tuned, no exchange at all, and ours.

Nodes are network namespaces of this machine on a bridge, one pinned core and one thread each, behind cables of a
limited rate. Contenders take turns in the same processes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.launch.machine import survey
from paceline_bench.cluster import emulated_scaling, prediction_error, tasks, time_to_accuracy
from paceline_bench.cluster.namespaces import unavailable
from paceline_bench.cluster.race import Pace
from paceline_bench.result import Finding, Show

# not part of the table, which takes 45 minutes: only when they are asked for
MORE: dict[str, tasks.Task] = {
    "predict": prediction_error.against_measured,
    "latency": prediction_error.late,
    "scaling": emulated_scaling.curves,
    "scaling-factors": emulated_scaling.of_factors,
    "scaling-sums": emulated_scaling.of_sums,
    "fashion": time_to_accuracy.to_goal,
}


def run(names: Sequence[str], pace: Pace, show: Show) -> Iterator[Finding]:
    """The named tasks, or the whole table. Raises ValueError for one that is not known, and where no cluster can be."""
    known = tasks.TASKS | MORE
    if strange := [name for name in names if name not in known]:
        raise ValueError(f"no task named {', '.join(strange)}; known: {', '.join(known)}")
    if why := unavailable():
        raise ValueError(f"`paceline bench cluster` makes its nodes on this machine, as network namespaces: {why}")
    for name in names or tasks.TASKS:
        yield from known[name](pace, show)


def write(findings: Sequence[Finding], rounds: int, out: Path) -> None:
    """A record: what was demanded and reached, every race's table, environment, command; raw.json with every turn."""
    out.mkdir(parents=True, exist_ok=True)
    machine = survey()
    demanded = [f for f in findings if f.demanded != "-"]
    told = [f for f in findings if f.demanded == "-"]
    rows = [f"| {f.what} | {f.figure} | {f.demanded} | {'yes' if f.reached else 'NO'} |" for f in demanded]
    head = ["| what | measured | demanded | reached |", "|---|---|---|---|"] if rows else []
    plain = "\n".join(f"- {f.what}: {f.figure}" for f in told if not f.details)
    details = "\n\n".join(f"## {f.what}\n\n{f.details}" for f in findings if f.details)
    (out / "README.md").write_text(
        f"# Several machines against their peers\n\n{time.strftime('%Y-%m-%d')}, {machine}, {machine.cpu}, "
        f"{len(os.sched_getaffinity(0))} cores, Linux {platform.release()}, Python {platform.python_version()}, torch "
        f"{importlib.metadata.version('torch')}, gloo.\n\n`{' '.join(['paceline', *sys.argv[1:]])}` as root. "
        f"Nodes are network namespaces on a bridge, shaped by tc tbf in both directions, one pinned core and one "
        f"thread each. Contenders take turns in the same processes (A B C A B C), each begun by a barrier; a step's "
        f"time is the slowest node's; bytes are the network card's, of the node that sends most. Rounds: {rounds}. "
        f"Ratios are of turns side by side: their median and the 90 % interval of the mean, of which the lower bound "
        f"counts. raw.json has every turn of every race.\n\n"
        + "\n".join([*head, *rows])
        + f"\n\n{plain}\n\n{details}\n"
    )
    (out / "raw.json").write_text(json.dumps([vars(f) for f in findings], indent=1))
