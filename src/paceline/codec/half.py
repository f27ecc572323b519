"""16-bit floats: half the bytes, no memory, rounded.

*Use* on links where fp32 gradients take longer than the backward pass. bf16 keeps fp32's range, so no
scaling is needed; fp16 has three more bits of precision and overflows above 65,504.
*Invariants*: decode(encode(x)) is x to half a unit in the last place; zeros stay zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline import contract

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Codec(contract.Codec):
    """Two ranks add in the gradient's own type. Among N > 2 ranks the all-reduce adds in 16 bits, with N - 1 more
    roundings; training logs this when it begins."""

    fidelity, scaled = "rounded", True

    def __init__(self, type: str = "bf16"):
        if type not in TYPES:
            raise ValueError(f"codec 'half' knows no type {type!r}; known: {', '.join(TYPES)}")
        self.type = TYPES[type]
        self.wire = type

    def encode(self, flat: Tensor, memory: Any, step: int) -> tuple[Tensor, Any]:
        parts = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        return parts.to(self.type), None

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        parts = payload.to(dtype.to_real())
        return torch.view_as_complex(parts.view(-1, 2)) if dtype.is_complex else parts

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * numel if dtype.is_complex else 2 * numel
