"""Costs of communication between nodes, as exchanges declare them and the planner predicts them. Needs no torch.

    sum           all-reduce: on gloo's ring 2 (N - 1) messages, 2 (N - 1) / N n bytes of each rank
    all-gather    of every rank's n bytes: N - 1 messages, (N - 1) n bytes; a first one of the numbers of rows, where
                  these differ

A link reports the costs of its own algorithms; MPI's differ from gloo's rings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.messages import ALL_GATHER, REDUCE_SCATTER, SHIFT, SUM, CommCost

SAVES_S = 2e-3  # seconds per step that another form of a layer's gradient must save
SAVES = 0.2  # likewise, as a part of the layer's time
SLOW_S = 4e-8  # per byte of a network: from here on lossless compression pays (200 Mbit/s)
COUNT_BYTES = 8  # of a rank's number of rows


CostFunction = Callable[[str, int], CommCost]  # of an operation on so many bytes


def ring(size: int) -> CostFunction:
    """Of gloo's rings."""

    def cost(operation: str, num_bytes: int) -> CommCost:
        if operation == SHIFT:
            return CommCost(1, num_bytes)
        if operation == REDUCE_SCATTER:
            return CommCost(size - 1, (size - 1) / size * num_bytes)
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
