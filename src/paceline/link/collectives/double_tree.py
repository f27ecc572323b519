"""Double binary tree: two trees, each for half of the elements; an inner node of one is a leaf of the other.

*Cost* (N ranks, n bytes): at most 4 log2 N steps of n / 2; a long tensor in S segments: about 4 S more, of n / (2 S),
so that 2 to 3 n follow one another. No rank sends more than 2 n.
*Order*: a rank adds its children's sums to its own, as the rounds bring them: a function of N and the length alone.
*Source*: Sanders, Speck and Traff 2009, with the trees of NCCL 2.4.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from paceline.link.net.collective_rounds import Message, bounds

SEGMENT = 1 << 16  # elements: shorter messages would cost more in steps than they hide
MAX_SEGMENTS = 16  # segments of each half


def parent(node: int, size: int) -> int:
    """The parent of a node but the root, 0: the lowest set bit moves one up, or is cleared where that is no node."""
    bit = node & -node
    up = node ^ bit | bit << 1
    return up if up < size else node ^ bit


def trees(ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    """The rank of node i, in each tree. Odd nodes are leaves: the second tree mirrors or shifts the ranks."""
    return list(ranks), list(ranks[::-1]) if len(ranks) % 2 == 0 else [*ranks[1:], *ranks[:1]]


def reduce(ranks: Sequence[int], count: int, nodes: Sequence[Hashable] = ()) -> Iterator[Message]:
    size = len(ranks)
    from_the_leaves = sorted(range(1, size), key=lambda node: node & -node)
    halves = bounds(count, 2)
    num_segments = max(1, min(MAX_SEGMENTS, count // 2 // SEGMENT))
    for segment in range(num_segments):
        for tree, begin, end in zip(trees(ranks), halves, halves[1:], strict=False):
            cuts = bounds(end - begin, num_segments)
            for node in from_the_leaves:
                ends = tree[node], tree[parent(node, size)]
                yield Message(*ends, begin + cuts[segment], begin + cuts[segment + 1])
