"""Error feedback around a lossy codec: what was not sent is added next time.

*Use* around any codec that loses mass: ``feedback/topk:keep=0.01``.
*Invariants*: sent + next residual = gradient + residual, bit for bit where the codec only selects; a step
that is not applied leaves the residual unchanged; redistribution to other ranks keeps the residuals' sum.
*Source*: Seide et al. 2014 (doi 10.21437/Interspeech.2014-274), section 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.codec.encoding.wrapper import Wrapper
from paceline.contract import Codec as Inner
from paceline.messages import Bucket, CodecRun, Coded, Round, StepContext


class Codec(Wrapper):
    """State: (residual (numel,), the inner codec's state)."""

    needs_feedback = False
    has_residual = True

    def __init__(self, inner: Inner | None = None):
        super().__init__(inner)
        self.has_residual, self.needs_feedback, self.scaled = True, False, False

    def init(self, bucket: Bucket, seed: int) -> Any:
        return None, self.inner.init(bucket, seed)

    def rounds(self, bucket: Bucket, size: int, dtype: torch.dtype) -> Sequence[Round]:
        return self.inner.rounds(bucket, size, dtype)

    def run(self, bucket: Bucket, values: Tensor, state: Any, context: StepContext) -> CodecRun:
        residual, deeper = state
        # a copy, which the residual may stay in
        wanted = values.clone() if residual is None else values + residual
        coded = yield from self.inner.run(bucket, wanted, deeper, dataclasses.replace(context, wants_residual=True))
        return Coded(coded.total, (coded.residual, coded.state), coded.residual)

    def keep_unapplied(self, before: Any, after: Any, unused: Sequence[slice]) -> Any:
        (old, deep), (new, deeper) = before, after
        if unused and not (old is None and new is None):
            new = torch.zeros_like(old) if new is None else new.clone()
            for values in unused:
                new[values] = 0 if old is None else old[values]
        return new, self.inner.keep_unapplied(deep, deeper, unused)

    def redistribute(self, states: Sequence[Any], rank: int, size: int) -> Any:
        residuals = [residual for residual, _ in states[rank::size] if residual is not None]
        whole = sum(residuals[1:], residuals[0]) if residuals else None
        return whole, self.inner.redistribute([deeper for _, deeper in states], rank, size)

    def on_view_change(self, bucket: Bucket, state: Any, seed: int) -> Any:
        residual, deeper = state
        return residual, self.inner.on_view_change(bucket, deeper, seed)
