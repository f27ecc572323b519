"""Low-rank approximation of each matrix of a gradient (PowerSGD): two small sums; lossy, for slow links.

    P = sum of M Q, orthonormalised        (rows, r)
    Q = sum of M.T P                       (columns, r), kept for the next step (warm start)
    the gradient is P Q.T, of which this node has sent P (M.T P).T: the rest is its residual

*Use* as ``feedback/lowrank:2``, with ``exchange="allreduce:forms=dense"``: then all parameters share few buckets, and
a step has few collectives instead of two for each large weight. Vectors, and matrices that this makes less than
``min_rate`` times smaller, are sent whole in the first sum.
*Cost*: 2 (N - 1) / N r (rows + columns) numbers instead of 2 (N - 1) / N rows columns, and 6 r rows columns
floating-point operations, 8 with feedback.
*Invariants*: P, Q and their product have the same bits on all nodes, whatever their processors and numbers of threads;
r >= the rank of every node's matrix: exact; the sum of what all nodes have sent is the gradient.
*Source*: Vogels, Karimireddy & Jaggi 2019 (arXiv 1905.13727), algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.codec.encoding.low_rank import bases, product
from paceline.messages import SUM, Bucket, CodecRun, Coded, Collective, Round, StepContext


class Codec(contract.Codec):
    """State: (seed, rank, min_rate, Q of each compressed matrix), the same on all nodes. ``rank``: r, at most."""

    fidelity = "approximate"
    needs_feedback = True
    bucket_bytes = 20_971_520  # a bucket and what is derived of it stay below what malloc maps anew each time

    def __init__(self, rank: int = 2, min_rate: float = 2.0):
        if not (isinstance(rank, int) and rank >= 1):
            raise ValueError(f"codec 'lowrank' sends matrices of a rank >= 1, a whole number; got rank={rank!r}")
        if not (isinstance(min_rate, int | float) and min_rate >= 0):
            raise ValueError(f"codec 'lowrank' compresses at least min_rate times, min_rate >= 0; got {min_rate!r}")
        self.rank, self.min_rate = rank, min_rate

    def init(self, bucket: Bucket, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + bucket.index)
        warm = [torch.randn(columns, r, generator=generator) for _, _, columns, r in self._matrices(bucket)]
        return seed, self.rank, self.min_rate, warm

    def rounds(self, bucket: Bucket, size: int, dtype: torch.dtype) -> Sequence[Round]:
        matrices = list(self._matrices(bucket))
        whole = bucket.numel - sum(rows * columns for _, rows, columns, _ in matrices)
        numels = [whole + sum(rows * r for _, rows, _, r in matrices), sum(columns * r for *_, columns, r in matrices)]
        return [Round(SUM, numel * _type(dtype).itemsize) for numel in numels if numel]

    def run(self, bucket: Bucket, values: Tensor, state: Any, context: StepContext) -> CodecRun:
        seed, *options, warm = state
        if options != [self.rank, self.min_rate]:  # of a checkpoint with other ones
            *_, warm = self.init(bucket, seed)
        flat = values.to(_type(values.dtype))
        parts, shapes = torch.split(flat, list(bucket.numels)), {i: shape for i, *shape in self._matrices(bucket)}
        matrices = {i: parts[i].view(rows, columns) for i, (rows, columns, _) in shapes.items()}
        small = [part for i, part in enumerate(parts) if i not in matrices]
        lefts = [matrix @ q.to(matrix) for matrix, q in zip(matrices.values(), warm, strict=True)]
        whole, lefts = yield from _summed(small, lefts)
        lefts = bases(lefts)
        rights = [matrix.mH @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        if context.wants_residual:
            for matrix, left, right in zip(matrices.values(), lefts, rights, strict=True):
                matrix.addmm_(left, right.mH, alpha=-1)
            for part in small:
                part.zero_()
        if rights:
            _, rights = yield from _summed([], rights)
        total = _filled(parts, shapes, lefts, rights, whole)
        warm = [right / right.abs().amax().clamp(min=torch.finfo(right.dtype).tiny) for right in rights]
        state = seed, self.rank, self.min_rate, warm
        return Coded(total.to(values.dtype), state, flat.to(values.dtype) if context.wants_residual else None)

    def on_view_change(self, bucket: Bucket, state: Any, seed: int) -> Any:
        return self.init(bucket, seed)

    def _matrices(self, bucket: Bucket) -> Iterator[tuple[int, int, int, int]]:
        """(place in the bucket, rows, columns, rank) of each matrix that is compressed."""
        for i, (shape, numel) in enumerate(zip(bucket.shapes, bucket.numels, strict=True)):
            rows = shape[0] if len(shape) > 1 and numel else 0
            columns = numel // rows if rows else 0
            r = min(self.rank, rows, columns)
            if r and self.min_rate * r * (rows + columns) < numel:
                yield i, rows, columns, r


def _type(dtype: torch.dtype) -> torch.dtype:
    """Orthonormalisation needs 32 bits."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _summed(*groups: Sequence[Tensor]) -> Any:
    """The sums over all nodes of several groups of tensors, in one collective."""
    flat = torch.cat([each.reshape(-1) for group in groups for each in group])
    parts = iter((yield Collective(SUM, flat)).split([each.numel() for group in groups for each in group]))
    return [[next(parts).view(each.shape) for each in group] for group in groups]


def _filled(
    parts: Sequence[Tensor],
    matrices: dict[int, Any],
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    whole: Sequence[Tensor],
) -> Tensor:
    """All parts as one flat tensor: products in the place of matrices, and ``whole`` for the others."""
    numels = [len(part) for part in parts]
    flat = parts[0].new_empty(sum(numels))
    factors, others = zip(lefts, rights, strict=True), iter(whole)
    for i, part in enumerate(torch.split(flat, numels)):
        if i in matrices:
            left, right = next(factors)
            product(left, right, part.view(len(left), len(right)))
        else:
            part.copy_(next(others))
    return flat
