"""Ring: every rank sends to one neighbour and receives from the other; fewest bytes, most steps.

*Cost* (N ranks, n bytes): 2 (N - 1) steps of n / N; each rank sends 2 (N - 1) / N n.
*Order*: slice i is added up from rank i on, around the ring: ((x_i + x_i+1) + ...) + x_i-1.
*Source*: Patarasuk and Yuan 2009; here the complete sums travel in the other direction.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from paceline.link.net.collective_rounds import Message, bounds


def reduce(ranks: Sequence[int], count: int, nodes: Sequence[Hashable] = ()) -> Iterator[Message]:
    size = len(ranks)
    cuts = bounds(count, size)
    for step in range(size - 1):
        for i, rank in enumerate(ranks):
            part = (i - step) % size
            yield Message(rank, ranks[(i + 1) % size], cuts[part], cuts[part + 1])
