"""Error feedback around a lossy codec: what was not sent is added next time.

*Use* around any codec that loses mass: ``feedback/topk:keep=0.01``.
*Invariants*: sent + next residual = gradient + residual, bit for bit where the codec only selects; a step
that is not applied leaves the residual unchanged; redistribution to other ranks keeps the residuals' sum.
*Source*: Seide et al. 2014 (doi 10.21437/Interspeech.2014-274), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract, messages


class Codec(contract.Codec):
    """Memory: (residual (numel,), the inner codec's memory)."""

    def __init__(self, inner: contract.Codec | None = None):
        if not isinstance(inner, contract.Codec):
            raise ValueError("codec 'feedback' needs a codec to wrap, as in 'feedback/topk:keep=0.01'")
        self.inner = inner
        self.fidelity, self.sums, self.wire = inner.fidelity, inner.sums, inner.wire
        self.takes_over, self.has_residual = inner.takes_over, True

    def init(self, bucket: messages.Bucket, rank: int, seed: int) -> Any:
        return None, self.inner.init(bucket, rank, seed)

    def encode(self, flat: Tensor, memory: Any, step: int) -> tuple[Tensor, Any]:
        residual, deeper = memory
        wanted = flat if residual is None else flat + residual
        payload, pending = self.inner.encode(wanted, deeper, step)
        # decodes the bytes that the others decode, so that the residual holds exactly what they did not receive
        return payload, (wanted - self.decode(payload, flat.numel(), flat.dtype), pending)

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return self.inner.decode(payload, numel, dtype)

    def commit(self, pending: Any, agreed: Tensor) -> Any:
        residual, deeper = pending
        return residual, self.inner.commit(deeper, agreed)

    def keep_unapplied(self, before: Any, after: Any, unused: Sequence[slice]) -> Any:
        (old, deep), (new, deeper) = before, after
        new = new.clone() if unused else new
        for values in unused:
            new[values] = 0 if old is None else old[values]
        return new, self.inner.keep_unapplied(deep, deeper, unused)

    def redistribute(self, memories: Sequence[Any], rank: int, size: int) -> Any:
        residuals = [residual for residual, _ in memories[rank::size] if residual is not None]
        whole = sum(residuals[1:], residuals[0]) if residuals else None
        return whole, self.inner.redistribute([deeper for _, deeper in memories], rank, size)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.inner.payload_bytes(numel, dtype)
