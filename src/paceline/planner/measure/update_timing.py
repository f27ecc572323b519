"""Optimizer timing: the engine's own update alone, on artificial gradients.

Learning rates are zero meanwhile, but the update may change other state, so the model is discarded afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from paceline import contract, messages
from paceline.messages import Gradient, Update, UpdateRule
from paceline.planner.measure.layers import lower_quartile, synced_time

MAX_PASSES = 7


class Updates:
    """Updates by ``engine`` of ``parameters``. ``rows``: factor rows of each fully-connected weight per step."""

    def __init__(
        self,
        engine: contract.Engine,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, torch.nn.Parameter],
        rows: dict[str, int],
        clip: float | None = None,
    ):
        self.engine, self.optimizer, self.parameters = engine, optimizer, parameters
        self.rows, self.clip = rows, clip
        self.optimizer_takes_factors = bool(getattr(engine, "optimizer_takes_factors", False))

    def factored(self) -> set[str]:
        """Weights that the optimizer updates from factors."""
        if not self.optimizer_takes_factors:
            return set()
        linear = ((bucket, self.rows.get(bucket.names[0], 0)) for bucket in self.engine.buckets if bucket.linear)
        return {bucket.names[0] for bucket, rows in linear if rows and bucket.fits(rows)}

    def dense_bytes(self) -> int:
        """Bytes of the gradients that are not factors."""
        factored = self.factored()
        trainable = (p for name, p in self.parameters.items() if p.requires_grad and name not in factored)
        return sum(p.nbytes for p in trainable)

    def can_fuse(self) -> bool:
        """Whether the optimizer has an unused fused kernel and at least half of the weights have dense gradients."""
        groups = self.optimizer.param_groups
        offered = all("fused" in group and not group["fused"] for group in groups)
        return offered and 2 * self.dense_bytes() > sum(p.nbytes for p in self.parameters.values() if p.requires_grad)

    def seconds(self, threads: int, kind: str, limit_s: float) -> float:
        """Seconds of an update. ``kind``: "factors", "fused", or "" for dense gradients and the unchanged optimizer."""
        torch.set_num_threads(threads)
        gradients = [self._gradient(bucket, kind == "factors") for bucket in self.engine.buckets]
        before = [{**group} for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
            if kind == "fused":
                group["fused"], group["foreach"] = True, False
        try:
            # the first one makes the optimizer's state
            return lower_quartile(passes(lambda: self._once(gradients), limit_s, least=1))
        finally:
            for group, old in zip(self.optimizer.param_groups, before, strict=True):
                group.update(old)

    def _gradient(self, bucket: messages.Bucket, factors: bool) -> Gradient:
        weight = self.parameters[bucket.names[0]]
        if factors and bucket.names[0] in self.factored():
            outputs, inputs = (weight.new_ones(self.rows[bucket.names[0]], width) for width in bucket.shapes[0])
            return Gradient(bucket, output_grad=outputs, layer_input=inputs)
        return Gradient(bucket, flat=weight.new_ones(bucket.numel))

    def _once(self, gradients: list[Gradient]) -> float:
        used = bytes([1] * len(self.engine.weights))
        weights: list[Any] = [self.engine.weights[0]]
        start = synced_time(weights)
        self.engine.apply(Update(gradients, used, UpdateRule(1.0, self.clip)))
        return synced_time(weights) - start


def passes(once: Callable[[], Any], limit_s: float, least: int = 0) -> list[Any]:
    """Results of ``once``: one call as warm-up, then as many as ``limit_s`` allows, usually at least one."""
    start = time.perf_counter()
    first = once()
    results: list[Any] = []
    allowed_s = 4 * limit_s
    while len(results) < MAX_PASSES and (
        len(results) < least or (time.perf_counter() - start) * (1 + 1 / (len(results) + 1)) < allowed_s
    ):
        results.append(once())
        allowed_s = limit_s
    return results or [first]
