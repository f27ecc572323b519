"""Which samples, in what order: a pure function of (seed, epoch, position).

Step t of an epoch uses positions [t B, (t + 1) B) of that epoch's permutation, whoever computes them;
an assignment says which of those rows are one's own. Nothing is kept per rank, so any number of nodes sees
the same global sequence, and the state to save is (seed, epoch, step).
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
    """``count`` rows among nodes in proportion to ``shares``, to within a row: what is left over goes to the largest
    remainders, and among equals to the lowest ranks.

    *Laws*: no row is lost; a larger share has no fewer rows; a share of 0 has none; shares that are themselves rows
    of ``count`` are assigned as they are. The same on every machine: nothing is rounded on the way.
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
    """One process's place: a node among nodes, with their shares of the work, and a part of the node's rows.

    ``shares``: numbers that the nodes' rows are in proportion to; None: all alike. ``virtual``: so many shares of the
    batch, always cut alike, are assigned whole; 0: it is assigned row by row. ``least``: in a batch of less than
    ``whole`` rows, no process has fewer than these, except none: batch norm may have nothing to normalise in one row.
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
        """The rows of a batch of ``count`` that are this process's: contiguous, disjoint, complete, in rank order."""
        nodes = self.rows_per_node(count)
        start, size = sum(nodes[: self.node]), nodes[self.node]
        parts = max(1, min(self.local_size, size // self.least)) if count < self.whole else self.local_size
        first, last = (start + min(rank, parts) * size // parts for rank in (self.local_rank, self.local_rank + 1))
        return range(first, last)

    def rows_per_node(self, count: int) -> tuple[int, ...]:
        """How many of them each node has."""
        if not self.virtual:
            return self._enough(count)
        cut = apportion(count, (1,) * self.virtual)
        return tuple(sum(cut[first:last]) for first, last in self._spans())

    def _enough(self, count: int) -> tuple[int, ...]:
        """Assigned to as many of the nodes, the largest shares first, as have ``least`` rows then."""
        shares = self._shares
        if count >= self.whole or self.least == 1:
            return apportion(count, shares)
        order = sorted(range(self.num_nodes), key=lambda node: (-shares[node], node))
        for number in range(self.num_nodes, 0, -1):
            those = set(order[:number])
            rows = apportion(count, tuple(share if node in those else 0 for node, share in enumerate(shares)))
            if not any(0 < each < self.least for each in rows):
                break
        return rows

    @property
    def span(self) -> tuple[int, int]:
        """The node's virtual shares: from, to."""
        return self._spans()[self.node]

    @property
    def _shares(self) -> tuple[float, ...]:
        return self.shares or (1,) * self.num_nodes

    def _spans(self) -> list[tuple[int, int]]:
        ends = list(accumulate(apportion(self.virtual, self._shares)))
        return list(zip([0, *ends], ends, strict=False))


def permutation(seed: int, epoch: int, size: int) -> Indices:
    """All samples once, in this epoch's order. Random words carry the samples' numbers and are sorted."""
    # NumPy promises the words of a bit generator for ever; it does not promise Generator.permutation
    words = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    bits = np.uint64(size.bit_length())
    words = (words >> bits << bits) | np.arange(size, dtype=np.uint64)
    words.sort()
    order: Indices = (words & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    return order


def num_steps(size: int, batch_size: int) -> int:
    """Steps per epoch. The last batch may be short: every sample is used."""
    return -(-size // batch_size)


def window(order: Indices, step: int, batch_size: int) -> Indices:
    """The global batch of one step."""
    return order[step * batch_size : (step + 1) * batch_size]
