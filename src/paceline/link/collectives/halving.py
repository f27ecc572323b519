"""Recursive halving and doubling: half of the elements to the far half of the ranks, then a quarter, and so on.

*Cost* (N ranks, n bytes): N a power of two: 2 log2 N steps, each rank sends 2 (N - 1) / N n, as in a ring. Else the
ranks beyond the power of two first add theirs to a neighbour's: 2 steps and up to 2 n more.
*Order*: pairs at distance N/2, then N/4, down to neighbours; the rank that keeps a slice adds the other's to its own.
*Source*: Rabenseifner; Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from paceline.link.net.collective_rounds import Message, bounds


def reduce(ranks: Sequence[int], count: int, nodes: Sequence[Hashable] = ()) -> Iterator[Message]:
    extra = len(ranks) - largest_power(len(ranks))
    for i in range(extra):
        yield Message(ranks[2 * i + 1], ranks[2 * i], 0, count)
    yield from halve([*ranks[: 2 * extra : 2], *ranks[2 * extra :]], count)


def largest_power(size: int) -> int:
    """The largest power of two that is not above ``size``."""
    return 1 << size.bit_length() - 1


def halve(ranks: Sequence[int], count: int) -> Iterator[Message]:
    """A reduce-scatter over a power of two of ranks: the i-th ends with the sum of slice i."""
    cuts = bounds(count, len(ranks))
    distance = len(ranks) // 2
    while distance:
        for i, rank in enumerate(ranks):
            partner = i ^ distance
            first = partner // distance * distance  # of as many slices as `distance`: those of the partner's side
            yield Message(rank, ranks[partner], cuts[first], cuts[first + distance])
        distance //= 2
