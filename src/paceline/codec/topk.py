"""Top-k sparsification: the few largest values with their positions; lossy, for slow links; use under feedback.

*Use* as ``feedback/topk:keep=0.01``: alone it never sends small values and does not converge well.
*Cost*: 4 bytes of position and one value for each of ceil(keep * numel) entries.
*Source*: Aji & Heafield 2017 (arXiv 1704.05021), with an exact threshold per bucket.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline import contract


class Codec(contract.Codec):
    """*Shapes*: payload (k * (4 + itemsize),) uint8: k int32 positions, then k values."""

    fidelity = "approximate"
    sums = False
    needs_feedback = True
    wire = "decoded, then the gradient's own type"

    def __init__(self, keep: float = 0.01):
        if not (isinstance(keep, int | float) and 0 < keep <= 1):
            raise ValueError(f"codec 'topk' keeps a share of the values, 0 < keep <= 1; got keep={keep!r}")
        self.keep = keep

    def _k(self, numel: int) -> int:
        return math.ceil(self.keep * numel - 1e-9)  # 0.07 of 100 is 7.000000000000001

    def encode(self, flat: Tensor, memory: Any, step: int) -> tuple[Tensor, Any]:
        k = self._k(flat.numel())
        positions = flat.abs().topk(k, sorted=False).indices.sort().values
        return torch.cat([positions.to(torch.int32).view(torch.uint8), flat[positions].view(torch.uint8)]), None

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        k = self._k(numel)
        positions = payload[: 4 * k].clone().view(torch.int32).long()
        values = payload[4 * k :].clone().view(dtype)
        return torch.zeros(numel, dtype=dtype, device=payload.device).index_copy_(0, positions, values)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self._k(numel) * (4 + dtype.itemsize)
