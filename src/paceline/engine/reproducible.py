"""Deterministic mode: one process computes its rows as virtual shares, so weights do not depend on the number of nodes.

A global batch is always cut into the same number of shares. Each has its own forward and backward pass, memory and
random numbers, and gradients are added up in the order of a fixed tree (exchange "ordered"). So the weights are
bit-equal whichever node computes a share, also after failures, on equal CPUs with equal numbers of threads.

*Cost*: that of smaller batches, and log2(shares) more gradients in memory; fully-connected layers are sent dense.
*Invariants*: 1, 2, 3 and 4 nodes, and fewer after a failure, have bit-equal weights after every step.
Not supported: BatchNorm's running statistics are those of each node's first share, so node 0's are the same for any
number of nodes only until node 0 fails; Python's and NumPy's random numbers inside forward; GPUs (on one the bits
depended on the number of nodes, also with torch's deterministic algorithms).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import transport
from paceline.contract import Loss, Share
from paceline.engine import sequential
from paceline.engine.compute import batch as batches
from paceline.engine.compute import rng
from paceline.engine.compute.batch import count, divisible, filled
from paceline.engine.node import affinity
from paceline.exchange.flow.metric_tensors import added
from paceline.exchange.flow.tree_sums import Span, add_up
from paceline.messages import Bucket, Gradient, Vote
from paceline.registry import SHARES, THREADS

MAX_SHARES = 256  # exact as an integer in every type that a gradient may have


class Shared(Gradient):
    """A gradient as sums over spans of virtual shares."""

    def __init__(self, bucket: Bucket, sums: dict[Span, Tensor], span: Span, num_shares: int, none: Tensor):
        super().__init__(bucket)
        self.sums, self.span, self.num_virtual_shards, self._none = sums, span, num_shares, none

    @property
    def flat(self) -> Tensor | None:
        """The sum of all shares, for an exchange that does not use spans."""
        if self._flat is None:
            assert self.sums is not None
            first, *others = [self.sums[span] for span in sorted(self.sums)] or [self._none]
            self._flat = first
            for part in others:
                self._flat = self._flat + part
        return self._flat


class Engine(sequential.Engine):
    """``num_threads``: intra-op threads, on which the bits depend, too; 0: one for each physical core."""

    counts, planned, reproduces = "share", False, True

    def __init__(self, num_shares: int = SHARES, num_threads: int = 0):
        super().__init__()
        if not (isinstance(num_shares, int) and 1 <= num_shares <= MAX_SHARES):
            raise ValueError(
                f"engine 'reproducible:k' cuts a batch into 1 <= k <= {MAX_SHARES} shares, got {num_shares!r}"
            )
        self.num_virtual_shards = num_shares
        self.num_threads = num_threads or len(affinity.physical(os.sched_getaffinity(0)))
        self._span, self._step = (0, num_shares), 0
        self._keeps = False  # each share is a copy

    def open(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, metric: Loss | None = None) -> None:
        if any(each.device.type == "cuda" for each in model.parameters()):
            raise ValueError(
                "engine 'reproducible' promises the same bits for any number of nodes, which kernels of a GPU do not "
                "give; use a model on the CPU, or another engine"
            )
        super().open(model, optimizer, loss, metric)

    def begin_step(self, assignment: Share, step: int) -> None:
        super().begin_step(assignment, step)
        if assignment.num_nodes > 1 and assignment.virtual != self.num_virtual_shards:
            raise ValueError(
                f"engine 'reproducible:{self.num_virtual_shards}' on {assignment.num_nodes} nodes needs rows assigned "
                f"in as many shares, and they are assigned in {assignment.virtual or 'none'}; let join() assign them"
            )
        self._span, self._step = assignment.span if assignment.virtual else (0, self.num_virtual_shards), step

    def gradient(self, batch: Any, scale: float, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Vote:
        start, (first, last), batch = time.perf_counter(), self._span, filled(batch)
        if batch is not None:
            divisible(batch, self.num_local_samples)
        self.num_local_samples = None  # it counts all shares
        parts = cut(batch, max(1, last - first))
        sums: dict[int, dict[Span, Tensor]] = {bucket.index: {} for bucket in self.buckets}

        def take(share: int, gradient: Gradient) -> None:
            partial_sums, flat = sums[gradient.bucket.index], gradient.flat
            assert flat is not None
            if share < last:
                partial_sums[share, share + 1] = flat
            if (whole := add_up((0, self.num_virtual_shards), partial_sums)) is not None:
                partial_sums[0, self.num_virtual_shards] = whole
            if share >= last - 1:
                offer(Shared(gradient.bucket, partial_sums, (first, last), self.num_virtual_shards, flat))

        before, after, looks, first_state = self.snapshot(), None, self.moving.looks, dict[str, Tensor]()
        votes, tensors = list[Vote](), list[Mapping[str, Tensor]]()
        for share, part in enumerate(parts, first):
            self.rollback(before)  # each share starts from the same state
            rng.seed(((self.seed * 1_000_003 + self._step) * MAX_SHARES + share) % (1 << 63))
            votes.append(super().gradient(part, scale, forms, partial(take, share)))
            tensors.append(self.metric_tensors)
            after = after or self.snapshot()
            if looks:
                self.moving.compare([first_state])
                first_state = first_state or {name: each.clone() for name, each in self.moving.tensors().items()}
        self.rollback(after)
        rng.set_state(before[2])
        vote, nothing = Vote.merge(votes), (0.0, 0.0, 0.0)
        vote.constant, self.metric_tensors = vote.trains_nothing, added(tensors)
        shares = [(each.loss_sum, each.metric_sum, each.weight) for each in votes[: last - first]]
        vote.shares = (*[nothing] * first, *shares, *[nothing] * (self.num_virtual_shards - last))
        vote.seconds = time.perf_counter() - start
        return vote

    def collect_gradients(self, vote: Vote, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Vote:
        raise ValueError(
            "backward() and update() compute rows in a shape of their own, which engine 'reproducible' cannot cut into "
            f"shares; use step(batch), or an engine that is not reproducible over nodes, such as {THREADS}:2"
        )

    def sync_norm(self, link: transport.Link | None) -> None:
        raise ValueError(
            "batch_norm='sync' is over the whole global batch, and engine 'reproducible' computes it share by share; "
            "use 'local'"
        )


def cut(batch: Any, parts: int) -> list[Any]:
    """A node's rows as its shares, the first of which have one row more, as in the whole batch; None: no rows. Each is
    a copy: the memory alignment of rows decides how some libraries multiply them."""
    rows = 0 if batch is None else count(batch)
    each, more = divmod(rows, parts)
    sizes = [each + (i < more) for i in range(parts)]
    ends = list(accumulate(sizes))
    return [
        batches.cut(batch, end - size, end, rows, Tensor.clone) if size else None
        for size, end in zip(sizes, ends, strict=True)
    ]
