"""The tensors of a step's metric, such as a confusion matrix, added up over all processes.

*Cost*: one all-gather after each step whose metric has any; nothing otherwise, since the vote says whether it has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from paceline.contract import Engine
from paceline.exchange.flow import gather
from paceline.messages import StepOutcome, Vote
from paceline.report.step_observer import StepObserver, StepSummary
from paceline.transport import Control, Waits, pack_frames, unpack_frames

LEFT_OUT = "a node failed after the step, with its part of the metric's tensors, so pace.metric has none of this step"


class MetricTensors(StepObserver):
    """``sums``: of the last step, by name. ``in_step``: false where nodes average later; they are this node's then."""

    def __init__(self, engine: Engine, control: Control, activity: Waits, in_step: bool = True):
        self.engine, self.control, self.activity, self.in_step = engine, control, activity, in_step
        self.sums: dict[str, Tensor] = {}
        self._gathered: Vote | None = None

    def updated(self, outcome: StepOutcome) -> None:
        """Raises ValueError, in all processes, and LinkError."""
        if outcome.vote.metric_tensors:
            self._gathered = outcome.vote
            with self.activity.at("adding up the tensors of the metric"):
                self._gather()

    def ends(self, summary: StepSummary) -> None:
        vote = summary.outcome.vote
        if vote is not self._gathered:  # it has none, or is read later, alone
            self.sums = added([self.engine.metric_tensors] if vote.metric_tensors else [])

    def _gather(self) -> None:
        control, tensors = self.control, self.engine.metric_tensors
        head = json.dumps([control.rank, control.size, list(tensors)]).encode()
        message = pack_frames([head, *map(gather.packed, tensors.values())])
        gathered = control.all_gather(message) if self.in_step else control.node_gather(message)
        received = list(map(unpack_frames, gathered))
        nodes = {tuple(json.loads(first)[:2]) for first, *_ in received}
        if self.in_step and len(nodes) < max(size for _, size in nodes):
            self.engine.hint, self.sums = LEFT_OUT, {}
            return
        self.sums = added(
            dict(zip(json.loads(first)[2], map(gather.unpacked, parts), strict=True)) for first, *parts in received
        )


def add_tensors(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Adds, in 64 bits, where the tensors are. Raises ValueError where shapes differ."""
    for name, part in more.items():
        own = part.detach() if part.is_cuda else part.detach().cpu()  # not every device has 64 bits
        wide = own.to(torch.float64 if part.is_floating_point() else torch.int64, copy=True)
        if name in sums and sums[name].shape != wide.shape:
            raise ValueError(
                f"the metric returned (tensor, None) of shape {tuple(wide.shape)} after one of "
                f"{tuple(sums[name].shape)}; these are added up over all batches: return one shape, a sum over samples"
            )
        sums[name] = sums[name] + wide if name in sums else wide


def added(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums by name. Raises ValueError where shapes differ."""
    sums: dict[str, Tensor] = {}
    for each in parts:
        add_tensors(sums, each)
    return sums
