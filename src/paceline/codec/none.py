"""No compression: the gradient itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline import contract


class Codec(contract.Codec):
    """*Cost*: the gradient's own bytes."""

    scaled = True

    def encode(self, flat: Tensor, memory: Any, step: int) -> tuple[Tensor, Any]:
        return flat, None

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return payload

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize
