"""Load balancing: per-node batch sizes that follow the measured speed of each node.

The vote on a step tells every node what every other spent on it, so all come to the same new shares at the same step
without another message. A node's step is taken as ``fixed + rows x seconds per row``, where only the update is known to
be fixed. What else does not depend on rows counts as if it did, so a change is too small rather than too large, and the
next one goes on from there.

    each step   the median over each node's last 9 steps; if that is not enough to be sure, over more
                the best rows for these medians: would the slowest node end more than 5 % earlier, beyond the noise?
    four yeses  these rows from the next step on, and all is measured anew

*Laws*: no row is lost; no node has more than its ``most`` nor fewer than its ``least``; nodes that differ by noise
alone keep their shares; a node that slows down has fewer rows soon after, and gets them back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP = 2  # steps after a change that say nothing yet
SPANS = (9, 17, 33, 65)  # odd: while a node's speed changes, the median is the old or the new, and nothing between
GAIN = 0.05  # of a step's time
SURE = 3.0  # standard errors that a median may be off by; counted in ranks, so whatever the noise is like
MIN_STEPS_IN_A_ROW = 4  # steps, one after the other, that must say so
MIN_S = 1e-9


@dataclass(frozen=True)
class Limits:
    """Rows of the global batch that each node needs, and takes."""

    least: tuple[int, ...]
    most: tuple[int, ...]


@dataclass(frozen=True)
class Reassignment:
    """Other shares, as rows of the global batch, from the next step on. *Units*: seconds of the slowest node's step."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    per_s: tuple[float, ...]
    step_s: float
    expected_s: float
    reason: str


class LoadBalancer:
    """``count``: rows of the global batch. ``least``, ``most``: of each node. Is told of the same steps everywhere."""

    def __init__(self, count: int, least: Sequence[int], most: Sequence[int]):
        self.count, self.least, self.most = count, tuple(least), tuple(most)
        self._forget()

    def _forget(self) -> None:
        self._seen = self._sure = 0
        self._paces: tuple[deque[tuple[float, float]], ...] = tuple(deque(maxlen=SPANS[-1]) for _ in self.least)

    def allows(self, rows: tuple[int, ...]) -> bool:
        if len(rows) != len(self.least) or sum(rows) != self.count:
            return False
        return all(low <= each <= high for low, each, high in zip(self.least, rows, self.most, strict=True))

    def after(self, rows: tuple[int, ...], paces: Sequence[tuple[float, float]]) -> Reassignment | None:
        """After a step in which the nodes had ``rows``. ``paces``: of each, the seconds that it did not wait for
        others, and those of them that depend on no rows."""
        if len(paces) != len(self.least) or sum(rows) < self.count or not all(rows):
            return None  # nodes did not meet, the batch was short, or a node's speed cannot be known
        self._seen += 1
        if self._seen <= WARM_UP:
            return None
        for kept, pace in zip(self._paces, paces, strict=True):
            kept.append(pace)
        changes = (self._change(rows, span) for span in SPANS if len(self._paces[0]) >= span)
        change = next(filter(None, changes), None)
        self._sure = self._sure + 1 if change else 0
        if self._sure < MIN_STEPS_IN_A_ROW:
            return None
        self._forget()
        return change

    def _change(self, rows: tuple[int, ...], span: int) -> Reassignment | None:
        recent = [list(kept)[-span:] for kept in self._paces]
        times = [sorted(max(MIN_S, busy) for busy, _ in node) for node in recent]
        busy = [each[span // 2] for each in times]
        fixed = [sorted(each for _, each in node)[span // 2] for node in recent]
        now = max(busy)
        if now - _ideal(rows, busy, fixed) <= GAIN * now:
            return None
        # what is left of it if all medians are as far off as they may be
        edge = max(0, int(span / 2 - SURE / 2 * math.sqrt(span)))
        cautious = [each[edge] if median == now else each[-1 - edge] for each, median in zip(times, busy, strict=True)]
        if max(each for each, median in zip(cautious, busy, strict=True) if median == now) <= _ideal(
            rows, cautious, fixed
        ):
            return None
        per_row = _per_row(rows, busy, fixed)
        new = fair_shares(self.count, fixed, per_row, self.least, self.most)
        expected = max(f + count * each for f, count, each in zip(fixed, new, per_row, strict=True))
        if now - expected <= GAIN * now:
            return None
        slowest = busy.index(now)
        per_s = tuple(count / each for count, each in zip(rows, busy, strict=True))
        reason = (
            f"for {span} steps node {slowest} was the slowest with {now:.3g} s for {rows[slowest]} rows; "
            f"{expected:.3g} s are expected"
        )
        return Reassignment(rows, new, per_s, now, expected, reason)


def fair_shares(
    count: int, fixed: Sequence[float], per_row: Sequence[float], least: Sequence[int], most: Sequence[int]
) -> tuple[int, ...]:
    """Rows of each node such that the last one ends as early as possible, each at ``fixed + rows x per_row``.

    ``least`` and ``most`` of a node: they must leave room for ``count``.
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
        can = [i for i in nodes if rows[i] < most[i]]
        rows[min(can, key=lambda i: (fixed[i] + (rows[i] + 1) * per_row[i], i))] += 1
    return tuple(rows)


def wanted(said: str | Sequence[float]) -> str | tuple[float, ...]:
    """What `join` and ``--shares`` were told: "measured", "equal", or numbers in proportion, also as "3,1".

    Raises ValueError."""
    if isinstance(said, str) and said in ("measured", "equal"):
        return said
    try:
        numbers = tuple(float(each) for each in (said.split(",") if isinstance(said, str) else said))
    except (TypeError, ValueError):
        numbers = ()
    if not any(numbers) or not all(0 <= each < math.inf for each in numbers):
        raise ValueError(
            f"shares are 'measured', 'equal', or a number >= 0 for each node, not all of them 0, such as 3,1; got "
            f"{said!r}"
        )
    return numbers


def _per_row(rows: Sequence[int], busy: Sequence[float], fixed: Sequence[float]) -> list[float]:
    return [max(MIN_S, each - f) / count for each, f, count in zip(busy, fixed, rows, strict=True)]


def _ideal(rows: Sequence[int], busy: Sequence[float], fixed: Sequence[float]) -> float:
    """When all would end together if parts of rows, and less than none, could be dealt: no rows can end earlier."""
    per_row = _per_row(rows, busy, fixed)
    at_once = math.fsum(1 / each for each in per_row)
    return (sum(rows) + math.fsum(f / each for f, each in zip(fixed, per_row, strict=True))) / at_once
