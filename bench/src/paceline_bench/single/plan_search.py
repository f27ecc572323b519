"""The plan against an exhaustive search: what was predicted before any row ran, and what was chosen.

Of each model, every exact candidate is timed in fresh processes, round by round; each round begins with a profile of
its own. The medians of a row's predictions and of its measurements are compared. `plan` starts anew several times,
within its default budget; each row that it chose meets the fastest of all in a duel: the fastest of several noisy
medians is partly luck, which a duel takes away.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.launch.machine import Machine, survey
from paceline.planner import planner
from paceline.planner.candidates import allowed, candidates, planned
from paceline.planner.cost_model import predicted_s
from paceline.planner.measure.profile import run_profile
from paceline.planner.measure.trial import measure
from paceline_bench.result import Finding, Show
from paceline_bench.single import job
from paceline_bench.single.paired import Contender, Spread, fight

JOBS = (("alexnet", 32), ("vgg16", 8), ("transformer", 16), ("vit", 8), ("mlp", 64))
STARTS = 2  # of the plan of each model
MEDIAN, P90, BEHIND, ENOUGH = 0.10, 0.25, 1.05, 0.9
TIMED_S = 1.5
MAX_ROUNDS = 3  # every row of every model: an hour of rounds says no more
EVEN = Spread(1.0, 1.0, 1.0)
DUEL_ROUNDS, DUEL_STEPS = 3, {"mlp": (20, 200)}  # else 6 turns of one step


@dataclass(frozen=True)
class Searched:
    """*Units*: seconds per step, of each round. ``chosen``: by each start, and how long it took, in seconds.
    ``behind``: the seconds of each row that was chosen over the best's."""

    model: str
    batch: int
    chosen: tuple[tuple[str, float], ...]
    predicted: dict[str, list[float]]
    measured: dict[str, list[float]]
    behind: dict[str, Spread] = field(default_factory=dict)

    def step_s(self, row: str) -> float:
        return statistics.median(self.measured[row])

    @property
    def errors(self) -> dict[str, float]:
        return {
            row: statistics.median(said) / self.step_s(row) - 1
            for row, said in self.predicted.items()
            if said and row in self.measured
        }

    @property
    def best(self) -> str:
        return min(self.measured, key=self.step_s)

    def table(self) -> str:
        lines = ["| row | predicted s, each round | measured s, each round | error |", "|---|---|---|---|"]
        for row, each in self.measured.items():
            said, error = self.predicted.get(row, []), self.errors.get(row)
            times = [row for row, _ in self.chosen].count(row)
            mark = f", chosen {times} times" if times else ""
            words = " | ".join(" ".join(f"{one:.4f}" for one in some) or "-" for some in (said, each))
            lines.append(f"| {row}{mark} | {words} | {'-' if error is None else f'{error:+.1%}'} |")
        return "\n".join(lines)


def search(rounds: int, show: Show, jobs: tuple[tuple[str, int], ...] = JOBS) -> Iterator[Finding]:
    """Raises ValueError where a job cannot be profiled, or nothing of it runs."""
    found = []
    for model, batch in jobs:
        one = searched(model, batch, min(rounds, MAX_ROUNDS), show)
        found.append(one)
        for row, spread in one.behind.items():
            what = f"{model} b{batch}: {row} (chosen) against {one.best} (best of {len(one.measured)})"
            yield Finding("search", what, str(spread), f"<= {BEHIND}", spread.median <= BEHIND, one.table())
        took = " and ".join(f"{spent_s:.0f}" for _, spent_s in one.chosen)
        yield Finding("search", f"{model} b{batch}: a plan's time", f"{took} s", "-", True)
    near = [one.behind[row].median <= BEHIND for one in found for row, _ in one.chosen]
    figure, demanded = f"{sum(near)} of {len(near)}", f">= {ENOUGH:.0%}"
    yield Finding("search", "starts within 5 % of the best", figure, demanded, sum(near) >= ENOUGH * len(near))
    errors = sorted(abs(error) for one in found for error in one.errors.values())
    middle, most = statistics.median(errors), errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    what = f"predicted against measured, {len(errors)} rows of {len(found)} models"
    yield Finding("search", f"{what}: median error", f"{middle:.1%}", f"<= {MEDIAN:.0%}", middle <= MEDIAN)
    yield Finding("search", f"{what}: 90th percentile", f"{most:.1%}", f"<= {P90:.0%}", most <= P90)


def searched(model: str, batch: int, rounds: int, show: Show) -> Searched:
    command, machine = [str(Path(job.__file__)), model, str(batch)], survey()
    starts = []
    for _ in range(STARTS):
        begin = time.perf_counter()
        with _without_shelf():
            made = planner.make(command, show=lambda doing: show(f"{model} b{batch}: plan: {doing}"), patient=True)
        starts.append((made.chosen, time.perf_counter() - begin))
    predicted: dict[str, list[float]] = {}
    measured: dict[str, list[float]] = {}
    for i in range(rounds):
        show(f"{model} b{batch}, round {i + 1} of {rounds}: profile")
        order = _predict(command, machine, predicted)
        random.Random(i).shuffle(order)
        for row in order:
            show(f"{model} b{batch}, round {i + 1} of {rounds}: {row}")
            trial = measure(command, row, timed_s=TIMED_S)
            if not trial.error:
                measured.setdefault(row, []).append(trial.step_s)
    if missing := [row for row, _ in starts if row not in measured]:
        raise ValueError(f"{model} b{batch}: the row that was chosen, {missing[0]}, did not run again")
    ran = {row: measured[row] for row in predicted if row in measured}
    found = Searched(model, batch, tuple(starts), predicted, ran)
    return replace(found, behind={row: _behind(found, row, show) for row, _ in starts})


def _behind(found: Searched, row: str, show: Show) -> Spread:
    if row == found.best:
        return EVEN
    rows = [Contender(each, "paceline", each) for each in (row, found.best)]
    duel = fight(found.model, found.batch, rows, DUEL_ROUNDS, DUEL_STEPS.get(found.model, (6, 1)), show)
    return duel.ratio(row, found.best)


def _predict(command: list[str], machine: Machine, predicted: dict[str, list[float]]) -> list[str]:
    """Adds a prediction to each row's, and returns all rows."""
    profile, unknown = run_profile(command, "exact", planner.MIN_BUDGET_S * planner.PROFILE_SHARE, machine)
    if profile is None:
        raise ValueError(f"{' '.join(command[1:])} could not be profiled: {unknown}")
    rows = [row for row in candidates("exact", machine, profile.facts, planned()) if allowed(row, "exact")]
    for row in rows:
        said = predicted_s(row, profile, machine.cores)
        predicted.setdefault(row, []).extend([said] if said is not None else [])
    return rows


@contextmanager
def _without_shelf() -> Iterator[None]:
    """A plan that was kept would be found, and nothing searched."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before
