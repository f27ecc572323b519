"""No compression: the gradient itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.codec.encoding.packing import row_round, row_sum
from paceline.messages import DENSE, FACTORS, Bucket, CodecRun, Coded, Round, StepContext


class Codec(contract.Codec):
    """*Cost*: the gradient's own bytes."""

    scaled = True
    kinds = (DENSE, FACTORS)

    def rounds(self, bucket: Bucket, size: int, dtype: torch.dtype) -> Sequence[Round]:
        return [row_round(bucket, bucket.numel * dtype.itemsize)]

    def run(self, bucket: Bucket, values: Tensor, state: Any, context: StepContext) -> CodecRun:
        return Coded((yield from row_sum(bucket, values)))
