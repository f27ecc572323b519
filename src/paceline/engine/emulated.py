"""Trace replay: sleeps for the recorded time of each layer, and offers buckets of the real sizes.

It needs almost no CPU time, so that many nodes of any speed fit on a few cores, while exchange, link and network are
real. ``emulated:FILE`` replays a timeline (`timeline.record`) from the current folder, ``emulated:FILE,faster=10`` in a
tenth of its time. Nothing is trained, and every share takes as long as the recorded one. Results are times and bytes,
always labelled emulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import contract, transport
from paceline.contract import Loss
from paceline.engine.compute.forward_state import Moving
from paceline.engine.compute.timeline import Timeline
from paceline.messages import DENSE, FACTORS, Gradient, Update, Vote
from paceline.registry import ONE_PROCESS


class Engine(contract.Engine):
    """``fill``: the value of every gradient, and of every left factor; right factors are ones. ``late_s``: the largest
    delay of the replay behind its timeline, for lack of CPU time."""

    fidelity = "emulated"

    def __init__(self, file: str, faster: float = 1.0, fill: float = 1.0):
        if not faster > 0:
            raise ValueError(f"engine 'emulated': faster={faster} must be above 0; 10 is ten times as fast as recorded")
        self.timeline, self.faster, self.fill, self.late_s = Timeline.read(file), float(faster), fill, 0.0
        self.num_threads = 1

    def open(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, metric: Loss | None = None) -> None:
        """The model's own layers are not used."""
        line, self.optimizer = self.timeline, optimizer
        self.moving = Moving(nn.Module())
        self.buckets = line.buckets
        self.names = tuple(name for bucket in self.buckets for name in bucket.names)
        dtype = getattr(torch, line.dtype)
        self._flats = [torch.empty(bucket.numel, dtype=dtype) for bucket in self.buckets]
        self._factors = {
            bucket.index: [torch.ones(line.factor_rows[bucket.index], width, dtype=dtype) for width in bucket.shapes[0]]
            for bucket in self.buckets
            if bucket.linear
        }
        for left, _ in self._factors.values():
            left.fill_(self.fill)
        self._flop_s = self._recorded_flop_s()
        if self._flop_s:
            self.multiply = self._multiply

    def _recorded_flop_s(self) -> float:
        """Seconds per floating-point operation of multiplying out the largest layer's factors; 0: not recorded."""
        line = self.timeline
        known = [i for i in self._factors if line.products[i] and line.factor_rows[i]]
        if not known:
            return 0.0
        largest = max(known, key=lambda i: line.buckets[i].numel)
        return line.products[largest] / (2.0 * line.factor_rows[largest] * line.buckets[largest].numel)

    def _multiply(self, into: Tensor, left: Tensor, right: Tensor) -> None:
        """Takes as long as on the recorded machine; the exchange measures it to choose between forms."""
        end = time.perf_counter() + 2.0 * left.numel() * right.shape[1] * self._flop_s / self.faster
        while time.perf_counter() < end:  # too short for a sleep
            pass

    @property
    def buffers(self) -> Sequence[Tensor]:
        return ()

    def gradient(self, batch: Any, scale: float, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Vote:
        """``batch``: only whether it is None matters."""
        line, present = self.timeline, batch is not None
        seconds = {form: dict(line.backward[form]) for form in (DENSE, FACTORS)}
        start = self._due = time.perf_counter()
        for _, layer_s in line.forward:
            self._wait(layer_s * present)
        for index, _ in line.backward[FACTORS if FACTORS in forms else DENSE]:
            gradient = self._gradient(index, forms[index], present)
            self._wait(seconds[forms[index]][index] * present)
            offer(gradient)
        return Vote(
            weight=float(line.rows * present),
            seconds=time.perf_counter() - start,
            used=bytes([present]) * len(self.names),
            dense=bytes(len(self.buckets)),
            rows=tuple(rows * present for rows in line.factor_rows),
        )

    def _gradient(self, index: int, form: str, present: bool) -> Gradient:
        if form == FACTORS:
            left, right = (side[: len(side) * present] for side in self._factors[index])
            return Gradient(self.buckets[index], output_grad=left, layer_input=right)
        # refilled, since the last step's sum was made in this memory
        return Gradient(self.buckets[index], flat=self._flats[index].fill_(self.fill * present))

    def _wait(self, seconds: float) -> None:
        """Sleeps until the timeline's next event; deducts the time of filling a bucket or of oversleeping."""
        self._due += seconds / self.faster
        left_s = self._due - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        else:
            self.late_s = max(self.late_s, -left_s)

    def apply(self, update: Update) -> bool:
        rows = {each.bucket.index: len(each.output_grad) for each in update.gradients if each.output_grad is not None}
        self._due = time.perf_counter()
        self._wait(self.timeline.updating(rows))
        return True

    def forward(self, batch: Any) -> NoReturn:
        raise ValueError(f"engine 'emulated' emulates: it has no outputs to evaluate; use {ONE_PROCESS}")

    def collect_gradients(self, vote: Vote, forms: Sequence[str], offer: Callable[[Gradient], None]) -> NoReturn:
        raise ValueError(f"engine 'emulated' emulates whole steps: backward() and update() need {ONE_PROCESS}")

    def sync_norm(self, link: transport.Link | None) -> NoReturn:
        raise ValueError("engine 'emulated' replays no sums within forward; use batch_norm='local'")

    def snapshot(self) -> None:
        return None

    def rollback(self, kept: Any) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {}

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        pass
