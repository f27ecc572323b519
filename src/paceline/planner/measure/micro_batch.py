"""Micro-batch timer: forward and backward of the whole model, whose gradients are added to those of the one before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn

from paceline.planner.measure.layers import lower_quartile, synced_time


class MicroBatchTimer:
    """``loss()``: of the micro-batch. ``absorbed``: ids of weights whose update uses factors, not gradients."""

    def __init__(self, loss: Callable[[], Tensor], weights: Sequence[nn.Parameter], absorbed: Collection[int]):
        self.loss, self.weights = loss, weights
        self.absorbed = [each for each in weights if id(each) in absorbed]

    def time(self) -> list[float]:
        """One pass: its seconds."""
        for weight in self.absorbed:
            weight.requires_grad_(False)
        try:
            start = synced_time(self.weights)
            self.loss().backward()  # type: ignore[no-untyped-call]
            return [synced_time(self.weights) - start]
        finally:
            for weight in self.absorbed:
                weight.requires_grad_(True)

    def total_s(self, passes: Sequence[Sequence[float]]) -> float:
        return lower_quartile([seconds for (seconds,) in passes])
