"""Sampler: the order of samples, a pure function of (seed, epoch, position).

Step t of an epoch uses positions [t B, (t + 1) B) of that epoch's permutation, on any set of processes. An assignment
determines which of those rows belong to a process. There is no state per rank, so any number of nodes has the same
global sequence, and the state to save is (seed, epoch, step).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@lru_cache(maxsize=1024)
def apportion(count: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Divides ``count`` rows among nodes in proportion to ``shares``, to within a row. The remaining rows go to the
    largest remainders, and among equal ones to the lowest ranks.

    *Invariants*: the rows add up to ``count``; a larger share has no fewer rows; a share of 0 has none; shares that add
    up to ``count`` are returned unchanged. The result is the same on every machine, as the arithmetic is exact.
    """
    total = sum(map(Fraction, shares))
    if not total > 0:
        raise ValueError(f"shares are numbers >= 0 of which one at least is not 0, got {shares}")
    fair = [count * Fraction(share) / total for share in shares]
    rows = [int(part) for part in fair]
    by_remainder = sorted(range(len(rows)), key=lambda node: (rows[node] - fair[node], node))
    for node in by_remainder[: count - sum(rows)]:
        rows[node] += 1
    return tuple(rows)


@dataclass(frozen=True)
class Assignment:
    """The part of a batch for one process: its node among the nodes, their shares, and its rank in the node.

    ``shares``: the nodes' rows are in proportion to these; None: equal. ``virtual``: the number of virtual shards into
    which the batch is divided, and which are assigned whole; 0: single rows are assigned. ``least``: in a batch of less
    than ``whole`` rows each process has at least so many, or none, as batch norm may fail on a single row.
    """

    node: int = 0
    num_nodes: int = 1
    local_rank: int = 0
    local_size: int = 1
    shares: tuple[float, ...] | None = None
    virtual: int = 0
    least: int = 1
    whole: int = 0

    def rows(self, count: int) -> range:
        """This process's rows of a batch of ``count``; over all ranks: contiguous, disjoint, complete, in order."""
        nodes = self.rows_per_node(count)
        start, size = sum(nodes[: self.node]), nodes[self.node]
        parts = max(1, min(self.local_size, size // self.least)) if count < self.whole else self.local_size
        first, last = (start + min(rank, parts) * size // parts for rank in (self.local_rank, self.local_rank + 1))
        return range(first, last)

    def rows_per_node(self, count: int) -> tuple[int, ...]:
        """The number of rows of each node, of a batch of ``count``."""
        if not self.virtual:
            return self._with_minimum(count)
        parts = apportion(count, (1,) * self.virtual)
        return tuple(sum(parts[first:last]) for first, last in self._spans())

    def _with_minimum(self, count: int) -> tuple[int, ...]:
        """Rows for as many nodes, largest shares first, as can each have ``least`` rows."""
        shares = self._shares
        if count >= self.whole or self.least == 1:
            return apportion(count, shares)
        order = sorted(range(self.num_nodes), key=lambda node: (-shares[node], node))
        for number in range(self.num_nodes, 0, -1):
            chosen = set(order[:number])
            rows_per_node = apportion(count, tuple(share if node in chosen else 0 for node, share in enumerate(shares)))
            if not any(0 < rows < self.least for rows in rows_per_node):
                break
        return rows_per_node

    @property
    def span(self) -> tuple[int, int]:
        """The node's virtual shards: (first, end)."""
        return self._spans()[self.node]

    @property
    def _shares(self) -> tuple[float, ...]:
        return self.shares or (1,) * self.num_nodes

    def _spans(self) -> list[tuple[int, int]]:
        ends = list(accumulate(apportion(self.virtual, self._shares)))
        return list(zip([0, *ends], ends, strict=False))


def permutation(seed: int, epoch: int, size: int) -> Indices:
    """All samples once, in this epoch's order: sorts random words, whose low bits are the sample numbers."""
    # NumPy guarantees the output of a bit generator for all versions, but not that of Generator.permutation
    words = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    bits = np.uint64(size.bit_length())
    words = (words >> bits << bits) | np.arange(size, dtype=np.uint64)
    words.sort()
    order: Indices = (words & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    return order


def num_steps(size: int, batch_size: int) -> int:
    """Steps per epoch. The last batch may be short, so that every sample is used."""
    return -(-size // batch_size)


def window(order: Indices, step: int, batch_size: int) -> Indices:
    """The global batch of one step."""
    return order[step * batch_size : (step + 1) * batch_size]
