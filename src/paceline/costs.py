"""Costs of communication between nodes, as exchanges declare them and the planner predicts them. Needs no torch.

    sum           all-reduce: on gloo's ring 2 (N - 1) messages, 2 (N - 1) / N n bytes of each rank
    all-gather    of every rank's n bytes: N - 1 messages, (N - 1) n bytes; a first one of the numbers of rows, where
                  these differ

A link reports the costs of its own algorithms; MPI's differ from gloo's rings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

DENSE, FACTORS = "dense", "factors"
SUM, MAX, ALL_GATHER = "sum", "max", "all-gather"

SAVES_S = 2e-3  # seconds per step that another form of a layer's gradient must save
SAVES = 0.2  # likewise, as a part of the layer's time
SLOW_S = 4e-8  # per byte of a network: from here on lossless compression pays (200 Mbit/s)
COUNT_BYTES = 8  # of a rank's number of rows


@dataclass(frozen=True)
class CommCost:
    """*Units*: sequential messages, bytes sent per rank, floating-point operations per rank."""

    steps: float
    bytes: float
    flops: float = 0.0

    def __add__(self, other: CommCost) -> CommCost:
        return CommCost(self.steps + other.steps, self.bytes + other.bytes, self.flops + other.flops)

    @property
    def in_sequence(self) -> float:
        """Bytes on the critical path, where a rank waits for data of another."""
        return self.bytes


CostFunction = Callable[[str, int], CommCost]  # of an operation on so many bytes


@dataclass(frozen=True)
class ExchangeTraffic:
    """The communication pattern of an exchange and its codec. *Units*: bytes per value sent; 0: of the value's type.

    ``factors``: fully-connected layers may be sent as factors. ``gathers``: gradients are all-gathered, and every node
    sums them itself. ``every``: 0, or the period of weight averaging (local SGD), without gradients. ``forward``:
    communication may overlap with the next forward pass. ``loses``: the codec is lossy, so its smaller size does not
    count against factors. ``norm_sums``: all-reduces of synchronised batch norm per step; ``norm_numel``: their values.
    """

    factors: bool = True
    dense_bytes: float = 0.0
    factor_bytes: float = 0.0
    gathers: bool = False
    every: int = 0
    forward: bool = False
    loses: bool = False
    norm_sums: int = 0
    norm_numel: int = 0


def ring(size: int) -> CostFunction:
    """Of gloo's rings."""

    def cost(operation: str, num_bytes: int) -> CommCost:
        if operation != ALL_GATHER:
            return CommCost(2 * (size - 1), 2 * (size - 1) / size * num_bytes)
        return CommCost(size - 1, (size - 1) * num_bytes)

    return cost


def summed(num_bytes: int, size: int, link_cost: CostFunction | None = None) -> CommCost:
    # the measured time per byte includes the additions
    return replace((link_cost or ring(size))(SUM, num_bytes), flops=0.0)


def gathered(num_bytes: int, size: int, link_cost: CostFunction | None = None) -> CommCost:
    """Of an all-gather of ``num_bytes`` of each rank, after one of the numbers of rows."""
    cost = link_cost or ring(size)
    rows = cost(ALL_GATHER, num_bytes)
    return replace(rows, steps=cost(ALL_GATHER, COUNT_BYTES).steps + rows.steps)


def clearly_differ(one_s: float, other_s: float) -> bool:
    """Whether two forms of a layer differ by much more per step than measurements do from each other."""
    return abs(one_s - other_s) > max(SAVES_S, SAVES * max(one_s, other_s))
