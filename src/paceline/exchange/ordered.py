"""Gradient synchronisation in a fixed order of summation: one tree, whichever rank has computed which part.

Each rank sends the partial sums of its virtual shares (engine "reproducible"), or else its gradient as one share of as
many as there are ranks. Every rank receives all partial sums, and adds up the rest of the tree.

*Cost* (N ranks, n bytes dense): (N - 1) n sent per rank where its shares are one span of the tree, as 2, 4 or 8 equal
parts of 8 are, else up to 2 log2(shares) times that; an all-reduce would send 2 (N - 1) / N n.
*Invariants*: as allreduce; with virtual shares, the same bits for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.exchange import allreduce
from paceline.exchange.flow.cost_model import cost_of, gathered
from paceline.exchange.flow.send_queue import InFlight, StepSends
from paceline.exchange.flow.tree_sums import Span, add_up, spans
from paceline.messages import DENSE, Bucket, CommCost, Gradient, Vote

HEAD = 3  # values before the sums: the number of shares in all, this rank's first share and its last + 1


class Exchange(allreduce.Exchange):
    """Sends gradients as they are."""

    overlaps = ("backward",)
    uses_codec, gathers, fixed_order = False, True, True

    def __init__(self) -> None:
        super().__init__(DENSE)

    def forms(self) -> Sequence[str]:
        return [DENSE] * len(self.buckets)

    def _send(self, gradients: Sequence[Gradient], flight: StepSends) -> InFlight:
        parts: list[Tensor] = []
        for gradient in gradients:
            sums, (low, high), num_shares = gradient.sums, gradient.span, gradient.num_virtual_shards
            if sums is None:
                assert gradient.flat is not None
                low, high, num_shares = self.link.rank, self.link.rank + 1, self.link.size
                sums = {(low, high): gradient.flat}
            like = next(iter(sums.values())) if sums else gradient.flat
            assert like is not None
            parts = parts or [torch.tensor([num_shares, low, high], dtype=like.dtype, device=like.device)]
            parts += [sums[span] for span in spans((0, num_shares), low, high)]
        payload, bucket = torch.cat(parts), gradients[0].bucket
        what = f"gathering bucket {bucket.index}: {', '.join(bucket.names[:2])} ({payload.nbytes / 1e6:.1f} MB)"
        begin_s = self.link.threads.now()
        return InFlight(gradients, self._lane.all_gather(payload, what), begin_s)

    def receive(self, flight: StepSends, bucket: Bucket) -> tuple[Gradient, Any]:
        assert self._flow
        sent, place = self._flow.take(flight, bucket.index)
        before = sum(gradient.bucket.numel for gradient in sent.gradients[:place])
        sums, whole = dict[Span, Tensor](), (0, 0)
        for payload in sent.result:
            num_shares, low, high = (int(value) for value in payload[:HEAD].real.tolist())
            whole, its_spans = (0, num_shares), spans((0, num_shares), low, high)
            start = HEAD + before * len(its_spans)
            for i, span in enumerate(its_spans):
                sums[span] = payload[start + i * bucket.numel : start + (i + 1) * bucket.numel]
        flat = add_up(whole, sums)
        assert flat is not None, f"of {whole[1]} shares of {bucket.names[0]} only {sorted(sums)} have come"
        return Gradient(bucket, flat=flat), None

    def remember(self, sums: Sequence[tuple[Gradient, Any]], vote: Vote) -> None:
        """This exchange uses no codec."""

    def cost(self, buckets: Sequence[Bucket], rows: int, size: int) -> CommCost:
        each = [gathered(4 * bucket.numel, size, cost_of(self.link, size)) for bucket in buckets]
        return CommCost(sum(one.steps for one in each), sum(one.bytes for one in each))
