"""Gradient synchronisation in a fixed order of summation: one tree, whichever rank has computed which part.

Each rank sends the partial sums of its virtual shares (engine "reproducible"), or else its gradient as one share of as
many as there are ranks. Every rank receives all partial sums, and adds up the rest of the tree.

*Cost* (N ranks, n bytes dense): (N - 1) n sent per rank where its shares are one span of the tree, as 2, 4 or 8 equal
parts of 8 are, else up to 2 log2(shares) times that; an all-reduce would send 2 (N - 1) / N n.
*Invariants*: as allreduce; with virtual shares, the same bits for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline.exchange import allreduce
from paceline.exchange.flow.tree_sums import Span, add_up, spans
from paceline.messages import (
    ALL_GATHER,
    DENSE,
    Coded,
    Collective,
    ExchangeTraffic,
    Gradient,
    StepContext,
)

HEAD = 3  # values before the sums: the number of shares in all, this rank's first share and its last + 1


class Exchange(allreduce.Exchange):
    """Sends gradients as they are."""

    overlaps = ("backward",)
    uses_codec, fixed_order = False, True

    def __init__(self) -> None:
        super().__init__(DENSE, "never")

    def forms(self) -> Sequence[str]:
        return [DENSE] * len(self.buckets)

    def _run(self, gradients: Sequence[Gradient], context: StepContext) -> Generator[Collective, Any, list[Coded]]:
        parts: list[Tensor] = []
        for gradient in gradients:
            sums, (low, high), num_shares = gradient.sums, gradient.span, gradient.num_virtual_shards
            if sums is None:
                assert gradient.flat is not None
                low, high, num_shares = context.rank, context.rank + 1, context.size
                sums = {(low, high): gradient.flat}
            like = next(iter(sums.values())) if sums else gradient.flat
            assert like is not None
            parts = parts or [torch.tensor([num_shares, low, high], dtype=like.dtype, device=like.device)]
            parts += [sums[span] for span in spans((0, num_shares), low, high)]
        payloads = yield Collective(ALL_GATHER, torch.cat(parts), even=False)
        numels = [gradient.bucket.numel for gradient in gradients]
        firsts = accumulate(numels, initial=0)
        return [Coded(_added_up(payloads, first, numel)) for first, numel in zip(firsts, numels, strict=False)]

    def traffic(self, dtype: torch.dtype) -> ExchangeTraffic:
        return ExchangeTraffic(factors=False, gathers=True)


def _added_up(payloads: Sequence[Tensor], first: int, numel: int) -> Tensor:
    """The sum of ``numel`` values, before which every partial sum has ``first`` others."""
    sums, whole = dict[Span, Tensor](), (0, 0)
    for payload in payloads:
        num_shares, low, high = (int(value) for value in payload[:HEAD].real.tolist())
        whole, its_spans = (0, num_shares), spans((0, num_shares), low, high)
        start = HEAD + first * len(its_spans)
        for i, span in enumerate(its_spans):
            sums[span] = payload[start + i * numel : start + (i + 1) * numel]
    flat = add_up(whole, sums)
    assert flat is not None, f"of {whole[1]} shares only {sorted(sums)} have come"
    return flat
