"""Contenders by turns: every round runs each once in fresh processes, and only ratios within a round are compared."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.launch import local

STUDENT_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)  # by rounds - 1, two-sided


@dataclass(frozen=True)
class Contender:
    """``engine``: the row that ours computes with, or how many processes the other starts."""

    name: str
    way: str
    engine: str = "sequential"


@dataclass
class Turn:
    """One run. *Units*: seconds per step (the slowest process's), bytes over all processes."""

    step_s: float
    loss: float
    peak_bytes: int
    pss_bytes: int


@dataclass(frozen=True)
class Spread:
    """The median over rounds, and the 90 % interval of the mean (Student's t)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, each: Sequence[float]) -> Spread:
        mean, half = statistics.fmean(each), 0.0
        if len(each) > 1:
            student = STUDENT_90[min(len(each) - 2, len(STUDENT_90) - 1)]
            half = student * statistics.stdev(each) / len(each) ** 0.5
        return cls(statistics.median(each), mean - half, mean + half)

    @classmethod
    def of_ratios(cls, slow: Sequence[float], fast: Sequence[float]) -> Spread:
        """How often faster, round by round; the mean is that of logarithms."""
        logs = cls.of([math.log(a / b) for a, b in zip(slow, fast, strict=True)])
        return cls(math.exp(logs.median), math.exp(logs.low), math.exp(logs.high))

    def __str__(self) -> str:
        return f"{self.median:.3f} (90 %: {self.low:.3f} to {self.high:.3f})"


@dataclass
class Duel:
    """All turns of all contenders on one model and batch."""

    model: str
    batch: int
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def step_s(self, name: str) -> float:
        return statistics.median(turn.step_s for turn in self.turns[name])

    def ratio(self, slow: str, fast: str) -> Spread:
        return Spread.of_ratios([t.step_s for t in self.turns[slow]], [t.step_s for t in self.turns[fast]])

    def memory(self, more: str, less: str, what: str = "peak_bytes") -> float:
        """Median bytes of ``less`` over those of ``more``."""
        one, other = (statistics.median(getattr(t, what) for t in self.turns[name]) for name in (less, more))
        return float(one / other)


def fight(
    model: str,
    batch: int,
    contenders: Sequence[Contender],
    rounds: int,
    steps: int,
    show: Callable[[str], None] = lambda doing: None,
) -> Duel:
    """Raises ValueError naming the contender that failed."""
    duel = Duel(model, batch, {contender.name: [] for contender in contenders})
    for i in range(rounds):
        order = list(contenders)
        random.Random(i).shuffle(order)
        for contender in order:
            show(f"{model} b{batch}, round {i + 1} of {rounds}: {contender.name}")
            duel.turns[contender.name].append(turn(contender, model, batch, steps))
    return duel


def turn(contender: Contender, model: str, batch: int, steps: int) -> Turn:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        command = [sys.executable, "-m", "paceline.bench.contender", contender.way, model, str(batch), str(steps)]
        environment = {"PACELINE_BENCH": folder}
        cores = str(len(os.sched_getaffinity(0)))
        if contender.way.startswith(("torch", "paceline")):
            environment["OMP_NUM_THREADS"] = cores
        engine = "processes:2" if contender.way.startswith("ddp") else contender.engine
        code = local.start(command, engine, environment=environment)
        said = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if code or not said:
        raise ValueError(
            f"{contender.name} failed on {model} with batch {batch} (exit code {code}); its error is above"
        )
    return Turn(
        max(one["step_s"] for one in said),
        said[0]["loss"],
        sum(one["peak_bytes"] for one in said),
        sum(one["pss_bytes"] for one in said),
    )
