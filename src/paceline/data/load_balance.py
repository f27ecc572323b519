"""Load balancing: per-node batch sizes that follow the measured speed of each node.

The vote on a step contains the time of every node, so all nodes derive the same new shares at the same step without
another message. A node's step time is modelled as ``fixed + rows x seconds per row``, where only the update is known to
be fixed. Other fixed time counts as proportional to the rows, so a change is too small rather than too large, and the
next change continues from there.

    each step        the median over each node's last 9 steps; if that is not significant, over more
                     the best rows for these medians: would the slowest node end over 5 % earlier, beyond the noise?
    four such steps  these rows are assigned from the next step on, and the measurement starts anew

*Invariants*: every row is assigned once; each node has at least its ``least`` and at most its ``most`` rows; nodes that
differ by noise alone keep their shares; a node that slows down soon has fewer rows, and gets them back afterwards.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP = 2  # steps after a change that are not measured
SPANS = (9, 17, 33, 65)  # odd, so that while a node's speed changes the median is the old or the new value
GAIN = 0.05  # of a step's time
STANDARD_ERRORS = 3.0  # tolerance of a median, as order statistics, so valid for any distribution of the noise
MIN_STEPS_IN_A_ROW = 4  # consecutive steps that must show the gain
MIN_S = 1e-9


@dataclass(frozen=True)
class Limits:
    """The least and the most rows of the global batch for each node."""

    least: tuple[int, ...]
    most: tuple[int, ...]


@dataclass(frozen=True)
class Reassignment:
    """New shares, as rows of the global batch, from the next step on. *Units*: seconds of the slowest node's step."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    per_s: tuple[float, ...]
    step_s: float
    expected_s: float
    reason: str


class LoadBalancer:
    """``count``: rows of the global batch. ``least``, ``most``: of each node. All nodes call it with the same steps."""

    def __init__(self, count: int, least: Sequence[int], most: Sequence[int]):
        self.count, self.least, self.most = count, tuple(least), tuple(most)
        self._reset()

    def _reset(self) -> None:
        self._num_steps = self._confirmed = 0
        self._paces: tuple[deque[tuple[float, float]], ...] = tuple(deque(maxlen=SPANS[-1]) for _ in self.least)

    def allows(self, rows: tuple[int, ...]) -> bool:
        if len(rows) != len(self.least) or sum(rows) != self.count:
            return False
        return all(low <= each <= high for low, each, high in zip(self.least, rows, self.most, strict=True))

    def after(self, rows: tuple[int, ...], paces: Sequence[tuple[float, float]]) -> Reassignment | None:
        """After a step in which the nodes had ``rows``. ``paces``: for each node its busy seconds, without waits for
        others, and the part of them that does not depend on rows."""
        if len(paces) != len(self.least) or sum(rows) < self.count or not all(rows):
            return None  # nodes did not communicate, the batch was short, or a node's speed is unknown
        self._num_steps += 1
        if self._num_steps <= WARM_UP:
            return None
        for history, pace in zip(self._paces, paces, strict=True):
            history.append(pace)
        changes = (self._change(rows, span) for span in SPANS if len(self._paces[0]) >= span)
        change = next(filter(None, changes), None)
        self._confirmed = self._confirmed + 1 if change else 0
        if self._confirmed < MIN_STEPS_IN_A_ROW:
            return None
        self._reset()
        return change

    def _change(self, rows: tuple[int, ...], span: int) -> Reassignment | None:
        recent = [list(history)[-span:] for history in self._paces]
        times = [sorted(max(MIN_S, busy) for busy, _ in node) for node in recent]
        busy = [each[span // 2] for each in times]
        fixed = [sorted(each for _, each in node)[span // 2] for node in recent]
        slowest_s = max(busy)
        if slowest_s - _ideal_s(rows, busy, fixed) <= GAIN * slowest_s:
            return None
        # the gain that remains if all medians are wrong by their tolerance
        edge = max(0, int(span / 2 - STANDARD_ERRORS / 2 * math.sqrt(span)))
        slow = [each == slowest_s for each in busy]
        cautious = [each[edge] if is_slow else each[-1 - edge] for each, is_slow in zip(times, slow, strict=True)]
        slowest_cautious_s = max(each for each, is_slow in zip(cautious, slow, strict=True) if is_slow)
        if slowest_cautious_s <= _ideal_s(rows, cautious, fixed):
            return None
        per_row = _per_row(rows, busy, fixed)
        new = fair_shares(self.count, fixed, per_row, self.least, self.most)
        expected = max(f + count * each for f, count, each in zip(fixed, new, per_row, strict=True))
        if slowest_s - expected <= GAIN * slowest_s:
            return None
        slowest = busy.index(slowest_s)
        per_s = tuple(count / each for count, each in zip(rows, busy, strict=True))
        reason = (
            f"for {span} steps node {slowest} was the slowest with {slowest_s:.3g} s for {rows[slowest]} rows; "
            f"{expected:.3g} s are expected"
        )
        return Reassignment(rows, new, per_s, slowest_s, expected, reason)


def fair_shares(
    count: int, fixed: Sequence[float], per_row: Sequence[float], least: Sequence[int], most: Sequence[int]
) -> tuple[int, ...]:
    """Rows of each node such that the last one ends as early as possible, each at ``fixed + rows x per_row``.

    ``least`` and ``most``: of each node; their sums must enclose ``count``.
    """
    nodes = range(len(fixed))

    def until(end: float) -> list[int]:
        return [min(most[i], max(least[i], int((end - fixed[i]) / per_row[i]))) for i in nodes]

    early, late = 0.0, max(fixed[i] + count * per_row[i] for i in nodes)
    for _ in range(64):
        middle = (early + late) / 2
        if sum(until(middle)) <= count:
            early = middle
        else:
            late = middle
    rows = until(early)
    while sum(rows) < count:
        candidates = [i for i in nodes if rows[i] < most[i]]
        rows[min(candidates, key=lambda i: (fixed[i] + (rows[i] + 1) * per_row[i], i))] += 1
    return tuple(rows)


def parse_shares(value: str | Sequence[float]) -> str | tuple[float, ...]:
    """The argument of `join` and ``--shares``: "measured", "equal", or proportional numbers, also as "3,1".

    Raises ValueError."""
    if isinstance(value, str) and value in ("measured", "equal"):
        return value
    try:
        numbers = tuple(float(each) for each in (value.split(",") if isinstance(value, str) else value))
    except (TypeError, ValueError):
        numbers = ()
    if not any(numbers) or not all(0 <= each < math.inf for each in numbers):
        raise ValueError(
            f"shares are 'measured', 'equal', or a number >= 0 for each node, not all of them 0, such as 3,1; got "
            f"{value!r}"
        )
    return numbers


def _per_row(rows: Sequence[int], busy: Sequence[float], fixed: Sequence[float]) -> list[float]:
    return [max(MIN_S, each - f) / count for each, f, count in zip(busy, fixed, rows, strict=True)]


def _ideal_s(rows: Sequence[int], busy: Sequence[float], fixed: Sequence[float]) -> float:
    """A lower bound of the step time: all nodes end together, with fractional and negative rows permitted."""
    per_row = _per_row(rows, busy, fixed)
    at_once = math.fsum(1 / each for each in per_row)
    return (sum(rows) + math.fsum(f / each for f, each in zip(fixed, per_row, strict=True))) / at_once
