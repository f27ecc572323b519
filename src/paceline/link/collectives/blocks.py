"""Binary blocks: any number of ranks as blocks of powers of two; recursive halving in each, then small into large.

*Cost* (N ranks, n bytes; L ranks in the largest block): 2 log2 L steps and those between blocks, where a rank of the
smaller block sends its slice in as many parts as the ratio of the block sizes; good for 8 + 4, poor for 8 + 1.
*Order*: within a block as in `halving`; then the larger block's sum + the smaller's, from the smallest block up.
*Source*: Rabenseifner and Traff; Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

from paceline.link.collectives.halving import halve, largest_power
from paceline.link.net.collective_rounds import Message, bounds


def reduce(ranks: Sequence[int], count: int, nodes: Sequence[Hashable] = ()) -> Iterator[Message]:
    blocks, rest = [], list(ranks)
    while rest:
        size = largest_power(len(rest))
        blocks.append(rest[:size])
        rest = rest[size:]
    for block in blocks:
        yield from halve(block, count)
    for large, small in reversed(list(pairwise(blocks))):
        cuts, ratio = bounds(count, len(large)), len(large) // len(small)
        for i, rank in enumerate(large):
            yield Message(small[i // ratio], rank, cuts[i], cuts[i + 1])
