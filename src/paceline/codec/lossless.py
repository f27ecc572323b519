"""Lossless compression around a codec, for a network that is slower than the processor.

*Use* as ``lossless/none``; the exchange ``allreduce`` does the same where it measures a slow network.
*Cost*, *source*: `codec/packing.py`. Sums among more than two nodes are not packed.
*Invariants*: the same bits as without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.codec.encoding.packing import packed, packed_round
from paceline.codec.encoding.wrapper import Wrapper
from paceline.messages import Bucket, CodecRun, Round, StepContext


class Codec(Wrapper):
    """State: the inner codec's."""

    def rounds(self, bucket: Bucket, size: int, dtype: torch.dtype) -> Sequence[Round]:
        return [packed_round(each, size) for each in self.inner.rounds(bucket, size, dtype)]

    def run(self, bucket: Bucket, values: Tensor, state: Any, context: StepContext) -> CodecRun:
        return packed(self.inner.run(bucket, values, state, context), context)
