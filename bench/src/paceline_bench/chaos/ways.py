"""How a struck training is parallel, and which of the laws that leaves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """``engines``: of the first start on many nodes, and of later ones; the last also where nodes are few. ``norm``:
    over the whole batch, or each sample's own. ``period``: steps between two averages of weights; where it is not 1, a
    lost node's part of them is dropped and the result is another than that of one process. ``ends``: words of a run
    that has lost what nobody else held, and may end; it goes on from its checkpoint."""

    exchange: str = "allreduce"
    engines: tuple[str, ...] = ("sequential", "threads:1", "processes:2")
    norm: str = "batch"
    period: int = 1
    ends: str = ""


ALLREDUCE = "allreduce"
WAYS = {
    ALLREDUCE: Way(),
    "server": Way("server", ("sequential", "threads:1"), ends="two neighbouring nodes"),
    "diloco": Way("diloco:period=5", norm="row", period=5),
    "hybrid": Way(
        engines=("pipeline:2,micros=2", "pipeline:2,micros=3", "processes:2/pipeline:2,micros=2"), norm="row"
    ),
}
