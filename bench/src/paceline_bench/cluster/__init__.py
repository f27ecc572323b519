"""Several machines against their peers: PyTorch's DDP by hand and tuned, no exchange at all, and ours.

Nodes are network namespaces of this machine on a bridge, one pinned core and one thread each, behind cables of a
limited rate. Contenders take turns in the same processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline_bench import result
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
    how = (
        f"as root. Nodes are network namespaces on a bridge, shaped by tc tbf in both directions, one pinned core and "
        f"one thread each; they talk by gloo. Contenders take turns in the same processes (A B C A B C), each begun by "
        f"a barrier; a step's time is the slowest node's; bytes are the network card's, of the node that sends most. "
        f"Rounds: {rounds}. Ratios are of turns side by side: their median and the 90 % interval of the mean, of which "
        f"the lower bound counts. raw.json has every turn of every race."
    )
    result.write(out, "Several machines against their peers", how, findings)
