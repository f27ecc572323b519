"""16-bit floats: half the bytes, no memory, rounded.

*Use* on links where fp32 gradients take longer than the backward pass. bf16 keeps fp32's range, so no
scaling is needed; fp16 has three more bits of precision and overflows above 65,504.
*Invariants*: what is sent is x to half a unit in the last place; zeros stay zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.codec.encoding.packing import row_round, row_sum
from paceline.messages import ALL_GATHER, DENSE, FACTORS, Bucket, CodecRun, Coded, Collective, Round, StepContext

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Codec(contract.Codec):
    """Two ranks gather both gradients, in as many bytes, and add in the gradient's own type. Among N > 2 ranks the
    all-reduce adds in 16 bits, with N - 1 more roundings; training logs this when it begins."""

    fidelity, scaled = "rounded", True
    kinds = (DENSE, FACTORS)

    def __init__(self, type: str = "bf16"):
        if type not in TYPES:
            raise ValueError(f"codec 'half' knows no type {type!r}; known: {', '.join(TYPES)}")
        self.type = TYPES[type]
        self.wire = type

    def rounds(self, bucket: Bucket, size: int, dtype: torch.dtype) -> Sequence[Round]:
        num_bytes = (4 if dtype.is_complex else 2) * bucket.numel
        return [Round(ALL_GATHER, num_bytes) if self._gathers(bucket, size, dtype) else row_round(bucket, num_bytes)]

    def run(self, bucket: Bucket, values: Tensor, state: Any, context: StepContext) -> CodecRun:
        real, dtype = values.dtype.to_real(), values.dtype
        payload = (torch.view_as_real(values).reshape(-1) if values.is_complex() else values).to(self.type)
        rounds = context.wants_residual and real != self.type
        residual = values.sub_(_like(payload, dtype)) if rounds else None
        if self._gathers(bucket, context.size, dtype):
            one, other = yield Collective(ALL_GATHER, payload)
            whole = one.to(real).add_(other)
        else:
            whole = yield from row_sum(bucket, payload)
        return Coded(_like(whole, dtype), residual=residual)

    def _gathers(self, bucket: Bucket, size: int, dtype: torch.dtype) -> bool:
        return size == 2 and bucket.kind == DENSE and dtype.to_real().itemsize > self.type.itemsize


def _like(payload: Tensor, dtype: torch.dtype) -> Tensor:
    parts = payload.to(dtype.to_real())
    return torch.view_as_complex(parts.view(-1, 2)) if dtype.is_complex else parts
