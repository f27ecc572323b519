"""Measurements in, one choice out; losing rows are kept as the reason.

The choice is the fastest row. Rows whose medians cannot be told apart count as equal, and then the simpler
one wins: it comes first in the order in which candidates are tried.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.probe.trial import Trial, measure


@dataclass(frozen=True)
class Row:
    """One candidate: its trial, its speedup over the first, and why it was chosen or not."""

    trial: Trial
    speedup: float
    reason: str


@dataclass(frozen=True)
class Plan:
    engine: str
    reason: str
    rows: tuple[Row, ...]


def candidates() -> list[str]:
    """What this machine could do, the baseline first, simple before complicated."""
    cores = len(os.sched_getaffinity(0))
    found = ["sequential"]
    if cores > 1:
        found += [f"threads:{cores}", f"processes:{cores}"]
    if cores > 3:
        found.append(f"processes:{cores // 2}")
    return found


def choose(trials: Sequence[Trial]) -> Plan:
    """Raises ValueError when no candidate ran: the first one's error says why."""
    ran = [trial for trial in trials if not trial.error]
    if not ran:
        raise ValueError(f"no candidate could be run; {trials[0].engine}: {trials[0].error}")
    base = ran[0]
    fastest = min(ran, key=lambda trial: trial.step_s)
    # a row's own noise is no merit: it counts no further than the fastest row's
    equals = [t for t in ran if t.step_s - min(t.spread_s, fastest.spread_s) <= fastest.step_s + fastest.spread_s]
    best = equals[0]

    def reason(trial: Trial) -> str:
        if trial.error:
            return f"failed: {trial.error}"
        if trial is best:
            return "chosen"
        if trial in equals:
            return "equal within the spread"
        return f"{trial.step_s / best.step_s - 1:.0%} slower"

    rows = tuple(Row(t, 0.0 if t.error else base.step_s / t.step_s, reason(t)) for t in trials)
    why = f"fastest of {len(ran)} measured" if best is fastest else "as fast as any, and simpler"
    if best is base and len(ran) > 1:
        why += "; nothing parallel pays here"
    return Plan(best.engine, why, rows)


def make(command: Sequence[str], show: Callable[[Trial], None] = lambda trial: None) -> Plan:
    """Tries every candidate on the command itself, one after the other."""
    trials = []
    for engine in candidates():
        trials.append(measure(command, engine))
        show(trials[-1])
    return choose(trials)
