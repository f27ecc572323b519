"""Shares of the global batch that follow the measured speed of each node.

The vote on a step tells every node what every other spent on it, so all come to the same new shares at the same step
without another message. A node's step is taken as ``fixed + rows x seconds per row``, where only the update is known to
be fixed. What else does not depend on rows counts as if it did, so a change is too small rather than too large, and the
next one goes on from there.

    each step   the median over each node's last 9 steps; if that is not enough to be sure, over its last 33
                the best rows for these medians: would the slowest node end more than 5 % earlier, beyond the noise?
    four yeses  these rows from the next step on, and all is measured anew

*Laws*: no row is lost; no node has more than its ``most`` nor fewer than its ``least``; nodes that differ by noise alone
keep their shares; a node that slows down has fewer rows soon after, and gets them back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP = 2  # steps after a change that say nothing yet
SPANS = (9, 33)  # odd: while a node's speed changes, the median is the old or the new, and nothing between
KEPT = 64  # steps that the noise is estimated from
GAIN = 0.05  # of a step's time
SURE = 3.0  # standard errors beyond that
PATIENCE = 4  # steps, one after the other, that must say so
LEAST_S = 1e-9


@dataclass(frozen=True)
class Change:
    """Other shares, as rows of the global batch, from the next step on. *Units*: seconds of the slowest node's step."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    per_s: tuple[float, ...]
    step_s: float
    expected_s: float
    reason: str


class Balance:
    """``count``: rows of the global batch. ``least``, ``most``: of each node. Is told of the same steps everywhere."""

    def __init__(self, count: int, least: Sequence[int], most: Sequence[int]):
        self.count, self.least, self.most = count, tuple(least), tuple(most)
        self._forget()

    def _forget(self) -> None:
        self._seen = self._sure = 0
        self._paces: tuple[deque[tuple[float, float]], ...] = tuple(deque(maxlen=KEPT) for _ in self.least)

    def allows(self, rows: tuple[int, ...]) -> bool:
        if len(rows) != len(self.least) or sum(rows) != self.count:
            return False
        return all(low <= each <= high for low, each, high in zip(self.least, rows, self.most, strict=True))

    def after(self, rows: tuple[int, ...], paces: Sequence[tuple[float, float]]) -> Change | None:
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
        if self._sure < PATIENCE:
            return None
        self._forget()
        return change

    def _change(self, rows: tuple[int, ...], span: int) -> Change | None:
        recent = [list(kept)[-span:] for kept in self._paces]
        busy = [max(LEAST_S, _median([one for one, _ in node])) for node in recent]
        fixed = [min(_median([one for _, one in node]), each) for node, each in zip(recent, busy, strict=True)]
        per_row = [max(LEAST_S, each - f) / count for each, f, count in zip(busy, fixed, rows, strict=True)]
        error = max(_noise([one for one, _ in kept]) for kept in self._paces) * 1.2533 / math.sqrt(span)
        now = max(busy)
        needed = GAIN * now + SURE * error
        new = fair(self.count, fixed, per_row, self.least, self.most)
        expected = max(f + count * s for f, count, s in zip(fixed, new, per_row, strict=True))
        if now - expected <= needed:
            return None
        slowest = busy.index(now)
        per_s = tuple(count / each for count, each in zip(rows, busy, strict=True))
        reason = (
            f"for {span} steps node {slowest} was the slowest with {now:.3g} s for {rows[slowest]} rows; "
            f"{expected:.3g} s are expected"
        )
        return Change(rows, new, per_s, now, expected, reason)


def fair(
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


def _median(values: Sequence[float]) -> float:
    """Of an odd number of them."""
    return sorted(values)[len(values) // 2]


def _noise(values: Sequence[float]) -> float:
    """The standard deviation around a level that may have changed once: from differences of successive values, without
    the largest of them."""
    steps = sorted(abs(b - a) for a, b in zip(values, list(values)[1:], strict=False))[:-1]
    return math.fsum(steps) / len(steps) / 1.128
