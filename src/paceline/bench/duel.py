"""Contenders by turns: a round is a life of each, in fresh processes; only ratios within a round are compared."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.bench.turns import Contender, Turn, play

__all__ = ["Contender", "Duel", "Spread", "Turn", "fight"]

WARM_UP_TURNS = 3

STUDENT_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)  # by rounds - 1, two-sided


@dataclass(frozen=True)
class Spread:
    """The median over rounds, and the 90 % interval of the mean (Student's t): of a single one, everything."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, each: Sequence[float]) -> Spread:
        mean, half = statistics.fmean(each), math.inf
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
        if math.isinf(self.high):
            return f"{self.median:.3f} (once, so without an interval)"
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
    steps: tuple[int, int],
    show: Callable[[str], None] = lambda doing: None,
) -> Duel:
    """``steps``: turns of each contender in a round, and steps in a turn. Raises ValueError naming who failed."""
    duel = Duel(model, batch, {contender.name: [] for contender in contenders})
    names = ", ".join(duel.turns)
    for i in range(rounds):
        show(f"{model} b{batch}, round {i + 1} of {rounds}: {names}")
        lives = play(contenders, model, batch, *steps, random.Random(i).shuffle, WARM_UP_TURNS)
        for name, life in lives.items():
            duel.turns[name].append(life)
    return duel
