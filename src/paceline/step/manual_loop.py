"""A step of the user's own loop: backward passes accumulated, then all-reduced like any other step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.contract import GlobalBatch, Share
from paceline.data.batches import UserBatch
from paceline.engine.checks.loss_graph import refuse_scaled
from paceline.engine.compute.batch import mapped, samples
from paceline.messages import Vote
from paceline.step.run_state import RunState
from paceline.step.step import ComputeGradient


class ManualStep:
    """``batch.weight``: what backward divides by. ``rows``: how many of its rows this process has, if known."""

    def __init__(self, batch: GlobalBatch, rows: int | None):
        self.batch, self.rows, self.vote = batch, rows, Vote()
        self.begun, self.start = False, time.perf_counter()

    def add(self, loss: Any, rows: int | None, loss_scale: float) -> Tensor:
        """The tensor for backward, which may need no gradient. ``loss``: a mean over ``rows``, or (sum, weight)."""
        rows = self.rows if rows is None else rows
        if isinstance(loss, tuple):
            total, weight = loss[0], float(loss[1])
        elif rows is None:
            raise ValueError(
                "backward() must know how many rows the mean is over: take them from pace.rows(batch), give rows=, or "
                "give the loss as (sum, weight)"
            )
        else:
            total, weight = loss * rows, float(rows)
        if self.begun and weight != self.vote.weight:
            raise ValueError(
                f"backward() was given losses over {self.vote.weight:g} and over {weight:g} in one step; all must "
                f"count the same rows: give one (sum, weight) over them all"
            )
        if not (isinstance(total, Tensor) and total.numel() == 1):
            shape = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
            raise ValueError(f"backward() takes one number (a mean over rows) or (sum, weight), got {shape}")
        self.begun = True
        self.vote.weight = weight
        self.vote.loss_sum += float(total.detach())
        self.vote.finite = self.vote.loss_sum - self.vote.loss_sum == 0.0
        scaled: Tensor = total * (loss_scale / self.batch.weight)
        return scaled


class ConsumedBatch(GlobalBatch):
    """A batch whose rows have already been used."""

    def __init__(self, batch: GlobalBatch):
        self.batch = batch
        self.epoch, self.step, self.ends_epoch = batch.epoch, batch.step, batch.ends_epoch
        self.weight, self.wait_s = batch.weight, batch.wait_s
        self.assigned, self.num_local_samples = batch.assigned, batch.num_local_samples

    def share(self, assignment: Share) -> None:
        return None


class ManualLoop:
    """Implements `rows`, `backward`, `clip` and `update` of `Pace`, as documented there. ``take_step``: of `Pace`.

    ``refuses``: raises where the model cannot be trained in such a loop.
    """

    def __init__(
        self, run: RunState, take_step: Callable[[GlobalBatch, ComputeGradient], float], refuses: Callable[[], None]
    ):
        self.run, self.take_step, self.refuses = run, take_step, refuses
        self._step: ManualStep | None = None
        self._checked = False  # the graph of a loss
        self._clip: float | None = None

    def rows(self, batch: GlobalBatch) -> Any:
        run, step = self.run, self._step
        self._refuse()
        if step and step.begun:
            raise ValueError(
                "rows() was called before update() applied the gradients of backward(): call update() after every "
                "batch; to accumulate over several batches, use a larger batch_size with accumulate="
            )
        seen = batch
        for each in run.observers:
            seen = each.reads(seen, own=True)
        share = seen.share(run.assignment)
        self._step = ManualStep(batch, 0 if share is None else samples(share, seen.num_local_samples))
        device = next(run.job.model.parameters()).device  # of several, that of the first layer
        return None if share is None else mapped(share, lambda tensor: tensor.to(device))

    def backward(self, loss: Any, rows: int | None) -> None:
        self._refuse()
        step = self._step = self._step or ManualStep(self._given(), rows)
        if not step.begun:
            self._clear_gradients()
        scaled = step.add(loss, rows, self.run.scaler.scale)
        if not self._checked:
            refuse_scaled(scaled)
            self._checked = True
        # without a gradient torch refuses it here; of several processes, all do so in `update`
        if scaled.requires_grad or self.run.world.world_size == 1:
            scaled.backward()  # type: ignore[no-untyped-call]

    def clip(self, norm: float) -> None:
        if not norm > 0:
            raise ValueError(f"clip() takes a norm > 0, got {norm!r}")
        if self.run.exchange.overlap == "forward":
            raise ValueError("clip() needs the norm of the whole gradient; with it, use join(overlap='backward')")
        self._clip = norm

    def update(self) -> float:
        self._refuse()
        run = self.run
        step = self._step or ManualStep(self._given(), 0)
        if not step.begun and (step.rows or run.world.world_size == 1):
            raise ValueError(
                "update() was called before backward(): give each loss to pace.backward(loss), in place of "
                "loss.backward()"
            )
        if not step.begun:
            self._clear_gradients()  # a process without rows must not send the gradients of the last step again
        previous, run.clip = run.clip, self._clip or run.clip
        self._step = self._clip = None
        spent_s = time.perf_counter() - step.start

        def gradient(_share: Any, _scale: float, forms: Any, offer: Any) -> Vote:
            vote = run.engine.collect_gradients(dataclasses.replace(step.vote), forms, offer)
            vote.seconds += spent_s
            return vote

        try:
            return self.take_step(ConsumedBatch(step.batch), gradient)
        finally:
            run.clip = previous

    def _given(self) -> UserBatch:
        return UserBatch(None, float(self.run.job.batch_size))

    def _refuse(self) -> None:
        self.refuses()
        if self.run.job.batch_norm == "sync":
            raise ValueError("batch_norm='sync' works inside pace.step alone; use 'local' in a loop of your own")

    def _clear_gradients(self) -> None:
        self.run.settle()
        for parameter in self.run.job.model.parameters():
            parameter.grad = None
