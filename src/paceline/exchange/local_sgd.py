"""Local SGD: each node trains alone, and weights are averaged every k steps: k times fewer bytes, other results.

*Cost*: 2 (N - 1) / N bytes of the weights every ``period`` steps, none between.
*Invariants*: period 1 with plain SGD equals all-reduce; after an average all replicas are bit-equal; with one rank
nothing changes; the mean over ranks, weighted by their samples, is conserved.
*Source*: local SGD, Stich 2018 (arXiv 1805.09767). Momentum stays local; a checkpoint has each node's.
"""

from __future__ import annotations

import statistics
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract, transport
from paceline.messages import (
    DENSE,
    Decision,
    ExchangeTraffic,
    Gradient,
    StepOutcome,
    Tally,
    Target,
    Vote,
)

# samples since the last average; the stop signal; seconds per step: busy, and those of them that are fixed; a hash
REPORT = struct.Struct("<dBddI")


class Exchange(contract.Exchange):
    """The average is weighted by the samples each rank has seen since the last one."""

    fidelity = "approximate"
    consensus = "period"
    uses_codec = False

    def __init__(self, period: int = 8):
        if not (isinstance(period, int) and period >= 1):
            name = type(self).__module__.rpartition(".")[2]
            raise ValueError(f"exchange {name!r} averages every k >= 1 steps, k whole, got {period!r}")
        self.period = period

    def open(
        self, engine: contract.Engine, link: transport.Link, codec: contract.Codec, rows: int = 1, seed: int = 0
    ) -> None:
        self.buckets, self.link = engine.buckets, link
        self.step, self.samples = 0, 0.0
        self._requested = self._reported = 0
        self._reports: list[tuple[Any, ...]] = []  # of each rank, at the last average
        self._forget()
        self.gradients: dict[int, Gradient] = {}

    def _forget(self) -> None:
        self._spent: list[tuple[float, float]] = []  # (busy, fixed) of each step since the last average
        self._paces: tuple[tuple[float, float], ...] = ()  # of each node, a step on average, once reported

    def forms(self) -> Sequence[str]:
        return [DENSE] * len(self.buckets)

    def put(self, gradient: Gradient) -> None:
        self.gradients[gradient.bucket.index] = gradient

    def collect(self, vote: Vote) -> Vote:
        return vote

    def finish(self, tally: Tally) -> StepOutcome:
        vote = tally.vote
        gradients, self.gradients = [self.gradients[bucket.index] for bucket in self.buckets], {}
        if not vote.ok:
            return StepOutcome(Decision.RETRY, vote=vote)
        self.samples += vote.weight
        self.step += 1
        if self.link.size > 1:
            # stop signals and paces that were reported with an average hold on all ranks from the next step on
            self._requested, vote.stop_signal, self._reported = vote.stop_signal or self._requested, self._reported, 0
            self._spent.append((vote.busy, vote.fixed))
            vote.paces, self._paces = self._paces, ()
        return StepOutcome(Decision.COMMIT, gradients, vote)

    def average(self, weights: Sequence[Tensor], now: bool, state: bool = False) -> Sequence[Target] | None:
        if self.link.size == 1 or not self._spent or not (now or self.step % self.period == 0):
            return None
        pace = (statistics.fmean(column) for column in zip(*self._spent, strict=True))
        packed = REPORT.pack(self.samples, self._requested, *pace, self._hash())
        report = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        received = self.link.all_gather(report, "the number of samples of each rank", even=True).wait()
        self._reports = [REPORT.unpack(bytes(part.numpy())) for part in received]
        total = sum(samples for samples, *_ in self._reports)
        return self._combined(weights, self.samples / total if total else 1 / self.link.size)

    def _hash(self) -> int:
        """Of what all nodes must have in common before an average."""
        return 0

    def _combined(self, weights: Sequence[Tensor], share: float) -> Sequence[Target]:
        """The weights with which all nodes continue. ``share``: this node's part of all samples."""
        parts = ((weight.detach() * share).reshape(-1) for weight in weights)
        sums = [self.link.sum(part, f"average of weight {i}") for i, part in enumerate(parts)]
        return [Target(i, each.wait()) for i, each in enumerate(sums)]

    def averaged(self) -> None:
        self._reported = max(signal for _, signal, *_ in self._reports)
        self._forget()
        self._requested = 0  # now reported; a rank that still requests a stop repeats it with its next vote
        self._paces = tuple((busy, fixed) for _, _, busy, fixed, _ in self._reports)
        self.samples = 0.0

    def traffic(self, dtype: torch.dtype) -> ExchangeTraffic:
        return ExchangeTraffic(factors=False, every=self.period)

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "samples": self.samples}

    def load(self, state: dict[str, Any]) -> None:
        self.step, self.samples = state["step"], state["samples"]
        self._forget()

    def rebuild(self, link: transport.Link) -> None:
        self.link = link
