"""Top-k sparsification: the few largest values with their positions; lossy, for slow links; use under feedback.

*Use* as ``feedback/topk:keep=0.01``: alone it never sends small values and does not converge well.
*Cost*: 4 bytes of position and one value for each of ceil(keep * numel) entries.
*Source*: Aji & Heafield 2017 (arXiv 1704.05021), with an exact threshold per bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.messages import ALL_GATHER, Bucket, CodecRun, Coded, Collective, Round, StepContext


class Codec(contract.Codec):
    """*Shapes*: payload (k * (4 + itemsize),) uint8: k int32 positions, then k values."""

    fidelity = "approximate"
    needs_feedback = True
    wire = "decoded, then the gradient's own type"

    def __init__(self, keep: float = 0.01):
        if not (isinstance(keep, int | float) and 0 < keep <= 1):
            raise ValueError(f"codec 'topk' keeps a share of the values, 0 < keep <= 1; got keep={keep!r}")
        self.keep = keep

    def rounds(self, bucket: Bucket, size: int, dtype: torch.dtype) -> Sequence[Round]:
        return [Round(ALL_GATHER, self._k(bucket.numel) * (4 + dtype.itemsize), even=False)]

    def run(self, bucket: Bucket, values: Tensor, state: Any, context: StepContext) -> CodecRun:
        k = self._k(bucket.numel)
        positions = values.abs().topk(k, sorted=False).indices.sort().values
        payload = torch.cat([positions.to(torch.int32).view(torch.uint8), values[positions].view(torch.uint8)])
        residual = values.index_fill_(0, positions, 0) if context.wants_residual else None
        first, *others = yield Collective(ALL_GATHER, payload, even=False)
        whole = self._decoded(first, values)
        for other in others:
            whole += self._decoded(other, values)
        return Coded(whole, residual=residual)

    def _k(self, numel: int) -> int:
        return math.ceil(self.keep * numel - 1e-9)  # 0.07 of 100 is 7.000000000000001

    def _decoded(self, payload: Tensor, like: Tensor) -> Tensor:
        k = self._k(len(like))
        positions, values = payload[: 4 * k].clone().view(torch.int32).long(), payload[4 * k :].clone().view(like.dtype)
        return torch.zeros_like(like).index_copy_(0, positions, values)
