"""Stochastic rounding to 8-bit integers with scales that all nodes share (QSGD): a quarter of the bytes, unbiased.

    scale    the largest magnitude of each block of values on any node: all nodes' largest values
    sent     round(levels * value / scale), up or down with the probability that makes its mean exact
    total    the sum of these integers, which fits into 8 bits, times scale / levels

*Cost*: 1 byte per value, and one number per block before; levels = 127 // N, so its noise grows with the N nodes.
*Invariants*: its mean is the gradient; a value's error is less than scale / levels per node; zeros stay zero; a
repeated step sends the same bytes.
*Source*: Alistarh et al. 2017 (arXiv 1610.02132), section 3, with the largest magnitude in place of the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.messages import MAX, SUM, Bucket, CodecRun, Coded, Collective, Round, StepContext

LARGEST = 127


class Codec(contract.Codec):
    """State: the seed. ``block``: the number of values that share a scale."""

    fidelity = "approximate"
    scaled = True
    wire = "8-bit integers"

    def __init__(self, block: int = 512):
        if not (isinstance(block, int) and block >= 1):
            raise ValueError(f"codec 'qsgd' has blocks of at least one value, a whole number; got block={block!r}")
        self.block = block

    def init(self, bucket: Bucket, seed: int) -> Any:
        return seed

    def rounds(self, bucket: Bucket, size: int, dtype: torch.dtype) -> Sequence[Round]:
        if size > LARGEST:
            raise ValueError(f"codec 'qsgd' adds integers of 8 bits, of at most {LARGEST} nodes; there are {size}")
        numel = bucket.numel * (2 if dtype.is_complex else 1)
        num_blocks = -(-numel // self.block)
        return [Round(MAX, num_blocks * _real(dtype).itemsize), Round(SUM, num_blocks * self.block)]

    def run(self, bucket: Bucket, values: Tensor, state: Any, context: StepContext) -> CodecRun:
        flat = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
        flat = flat.to(_real(values.dtype))
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)
        largest = blocks.abs().amax(1)
        # a maximum may lose NaN on its way
        scale = yield Collective(MAX, torch.where(largest.isfinite(), largest, torch.inf))
        levels = LARGEST // context.size
        step = (scale / levels)[:, None]
        usable = step.isfinite() & (step > 0)
        key = hash((state, bucket.index, context.step, context.rank)) & ((1 << 63) - 1)
        generator = torch.Generator(flat.device).manual_seed(key)
        noise = torch.rand(blocks.shape, generator=generator, dtype=flat.dtype, device=flat.device)
        wanted = torch.where(usable, blocks / torch.where(usable, step, 1), 0)
        codes = (wanted + noise).floor_().clamp_(-levels, levels).to(torch.int8)
        residual = values.sub_(_like(codes * step, values)) if context.wants_residual else None
        total = (yield Collective(SUM, codes.reshape(-1))).view(blocks.shape)
        return Coded(_like(total * step, values), state, residual)


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.to_real().itemsize < 4 else dtype.to_real()


def _like(blocks: Tensor, values: Tensor) -> Tensor:
    parts = blocks.reshape(-1).to(values.dtype.to_real())
    if values.is_complex():
        return torch.view_as_complex(parts[: 2 * len(values)].view(-1, 2))
    return parts[: len(values)]
