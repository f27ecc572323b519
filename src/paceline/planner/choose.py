"""The planner's decision: one configuration chosen by measurement or prediction, and why each other one was not.

The planner chooses the fastest measured candidate of an allowed fidelity. Candidates whose medians do not differ by
more than noise are ties, and the simplest of them wins: it comes first in the list. Few long steps give much noise, so
the winner of a tie may be slower than the fastest by at most MAX_SLOWDOWN.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planner.candidates import JobFacts, allowed, fidelity
from paceline.planner.measure.trial import Trial
from paceline.planner.plan_file import CHOSEN, TIE, Row
from paceline.registry import BASELINE, head, says

NOISE = 0.02  # relative: closer is a tie whatever the spread, since each start of a process differs by as much
MAX_SLOWDOWN = 0.05  # relative, of a simpler candidate that is chosen from a tie
OUT_OF_MEMORY = ("out of memory", "MemoryError", "can't allocate memory", "Cannot allocate memory", ": killed")
Choice = tuple[str, str, tuple[Row, ...]]  # (chosen, reason, rows)


@dataclass
class Candidate:
    """A configuration with its prediction and its trial. ``refusal`` says why it was not tried."""

    engine: str
    predicted_s: float | None = None
    trial: Trial | None = None
    refusal: str = ""

    @property
    def ran(self) -> Trial | None:
        return self.trial if self.trial and not self.trial.error else None

    @property
    def step_s(self) -> float:
        """Measured seconds, else predicted ones, else infinity."""
        return self.ran.step_s if self.ran else self.predicted_s or float("inf")


def tied(one: Trial, other: Trial) -> bool:
    """Whether two trials differ by no more than noise; of the slower one's spread at most the faster one's counts."""
    fast, slow = sorted((one, other), key=lambda trial: trial.step_s)
    noise_s = fast.spread_s + min(slow.spread_s, fast.spread_s)
    return slow.step_s - fast.step_s <= max(noise_s, NOISE * fast.step_s)


def run_off(candidates: Sequence[Candidate], level: str) -> list[Candidate]:
    """The candidates that ran and have an allowed fidelity, the fastest first."""
    ran = [one for one in candidates if one.ran and allowed(one.engine, level)]
    return sorted(ran, key=lambda one: one.step_s)


def correct(candidates: Sequence[Candidate]) -> None:
    """Multiplies the predictions of candidates that did not run by how far off those of the others were, in the median:
    a profile times layers on a machine that is faster or slower at another moment, and all of them alike."""
    ratios = [one.ran.step_s / one.predicted_s for one in candidates if one.ran and one.predicted_s]
    for one in candidates:
        if ratios and one.predicted_s and not one.ran:
            one.predicted_s *= statistics.median(ratios)


def choose(candidates: Sequence[Candidate], level: str = "exact", facts: JobFacts | None = None) -> Choice:
    """The choice. Raises ValueError with the first trial's error if no candidate ran or could be chosen."""
    ranking = run_off(candidates, level)
    if not ranking or not ranking[0].ran:
        return _by_prediction(candidates, level, facts)
    fastest = ranking[0]
    ties = [one for one in candidates if one in ranking and one.ran and tied(one.ran, fastest.ran)]  # type: ignore[arg-type]
    best = next(one for one in ties if one.step_s <= (1 + MAX_SLOWDOWN) * fastest.step_s)
    rows = tuple(_row(one, best, candidates[0], facts, level, ties) for one in candidates)
    why = f"fastest of {len(ranking)} measured" if best is fastest else "as fast as any, and simpler"
    if len(ranking) == 1:
        left = any(allowed(one.engine, level) and not (one.trial or one.refusal) for one in candidates)
        why = "the most promising, and the only one that there was time to measure" if left else "the only one that ran"
    if best.engine == BASELINE and len(ranking) > 1:
        why += "; sequential execution is fastest here"
    return best.engine, why, rows


def _by_prediction(candidates: Sequence[Candidate], level: str, facts: JobFacts | None) -> Choice:
    """As `choose`, by predictions alone: the budget left no time for a trial."""
    untried = [one for one in candidates if one.predicted_s and not (one.trial or one.refusal)]
    eligible = [one for one in untried if allowed(one.engine, level)]
    if not eligible:
        why = next((f"; {one.engine}: {one.trial.error}" for one in candidates if one.trial), "")
        raise ValueError(f"no candidate could be run{why}")
    best = min(eligible, key=lambda one: one.step_s)
    rows = tuple(_row(one, best, candidates[0], facts, level, ()) for one in candidates)
    return best.engine, "fastest as predicted; the budget left no time to try any", rows


def speedup(one: Candidate, base: Candidate) -> float | None:
    """From what was measured of each, else from its prediction, which `correct` has made comparable."""
    seconds = one.step_s, base.step_s
    return base.step_s / one.step_s if all(map(math.isfinite, seconds)) else None


def _rejection(one: Candidate, best: Candidate, base: Candidate, level: str) -> str:
    if one.trial and one.trial.error:
        memory = any(word in one.trial.error for word in OUT_OF_MEMORY)
        return f"{'out of memory' if memory else 'failed'}: {one.trial.error}"
    if one.refusal:
        return one.refusal
    if not allowed(one.engine, level):
        gain = speedup(one, base)
        would = f" would be {'' if one.ran else 'about '}{gain:.2f}x" if gain else ""
        return f"not {level}:{would}, --fidelity {fidelity(one.engine)} allows it"
    if one.ran:
        error = (one.ran.spread_s + (best.ran.spread_s if best.ran else 0.0)) / best.step_s
        return f"{one.step_s / best.step_s - 1:.0%} slower (± {error:.0%})"
    if one.predicted_s is None:
        return "not tried: no time left"
    behind = one.predicted_s / best.step_s - 1
    return f"not tried: predicted {behind:.0%} slower" if behind > 0 else "not tried: no time left"


def _row(
    one: Candidate, best: Candidate, base: Candidate, facts: JobFacts | None, level: str, ties: Sequence[Candidate]
) -> Row:
    ran = one.ran
    return Row(
        one.engine,
        one.predicted_s,
        ran.step_s if ran else None,
        ran.spread_s if ran else None,
        ran.per_s if ran else None,
        speedup(one, base),
        ran.peak_bytes if ran else None,
        fidelity(one.engine, facts),
        bool(ran and ran.extrapolated),
        len(ran.steps_s) if ran else 0,
        facts.division if facts and says("engine", head(one.engine)[0], "starts_processes") else "",
        CHOSEN if one is best else TIE if one in ties else _rejection(one, best, base, level),
    )


def choose_requested(rows: Sequence[Row], fastest: str, wanted: str) -> Choice:
    """As `choose`, for a requested configuration whose bits do not depend on the number of nodes; states its cost."""
    by_name = {row.engine: row for row in rows}
    one, best = by_name[wanted], by_name[fastest]
    cost = "no other candidate was measured" if one is best else one.reason
    if one.measured_s and best.measured_s and one is not best:
        cost = f"{one.measured_s / best.measured_s - 1:.0%} slower than {fastest}"
    reason = (
        f"reproducible, as requested: {cost}; between N nodes it sends N / 2 times as much as an all-reduce, and "
        f"fully-connected layers dense"
    )
    reasons = {fastest: "faster, and not reproducible", wanted: CHOSEN if one.measured_s else one.reason}
    return wanted, reason, tuple(dataclasses.replace(row, reason=reasons.get(row.engine, row.reason)) for row in rows)
