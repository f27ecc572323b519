"""Binomial tree: all values to rank 0 and back; fewest steps for small tensors, too many bytes for large ones.

*Cost* (N ranks, n bytes): 2 ceil(log2 N) steps of n; rank 0 sends ceil(log2 N) n.
*Order*: neighbours first, then pairs, then fours: ((x_0 + x_1) + (x_2 + x_3)) + ...
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from paceline.link.net.collective_rounds import Message


def reduce(ranks: Sequence[int], count: int, nodes: Sequence[Hashable] = ()) -> Iterator[Message]:
    distance = 1
    while distance < len(ranks):
        for i in range(distance, len(ranks), 2 * distance):
            yield Message(ranks[i], ranks[i - distance], 0, count)
        distance *= 2
