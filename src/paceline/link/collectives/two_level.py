"""Two levels: a binomial tree inside each node, a ring among the nodes' leaders, and back.

*Cost* (M nodes of up to G ranks, n bytes): 2 ceil(log2 G) + 2 (M - 1) steps; 2 (M - 1) / M n leave each node.
*Order*: a node's ranks as in `binomial`, then the nodes as in `ring`; a node's leader is its first rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from paceline.link.collectives import binomial, ring
from paceline.link.net.collective_rounds import Message


def reduce(ranks: Sequence[int], count: int, nodes: Sequence[Hashable] = ()) -> Iterator[Message]:
    """``nodes[rank]``: its node."""
    members: dict[Hashable, list[int]] = {}
    for rank in ranks:
        members.setdefault(nodes[rank], []).append(rank)
    for local in members.values():
        yield from binomial.reduce(local, count)
    yield from ring.reduce([local[0] for local in members.values()], count)
