"""The plan against an exhaustive search: what it predicted of the rows that it did not run, and what it chose.

`plan` starts anew several times, within its default budget. Then every exact candidate is timed in fresh processes,
round by round. The medians of a row's predictions, by the starts that did not run it, and of its measurements are
compared, in seconds, and relative to the baseline: a plan has a baseline of its own, and the search times one before
and after every row, so that a machine that is slower at another hour is no error of a prediction. Each row that was
chosen meets the fastest of all in a duel: the fastest of several noisy medians is partly luck, which a duel takes away.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.planner import planner
from paceline.planner.candidates import allowed
from paceline.planner.measure.trial import measure
from paceline.registry import BASELINE
from paceline_bench.result import Finding, Show
from paceline_bench.single import job
from paceline_bench.single.paired import Contender, Spread, fight

JOBS = (("alexnet", 32), ("vgg16", 8), ("transformer@128", 16), ("vit", 8), ("mlp", 64))
STARTS = 2  # of the plan of each model
MEDIAN, P90, BEHIND, ENOUGH = 0.10, 0.25, 1.05, 0.9
TIMED_S = 1.5
MAX_ROUNDS = 3  # every row of every model: an hour of rounds says no more
EVEN = Spread(1.0, 1.0, 1.0)
DUEL_ROUNDS, DUEL_STEPS = 3, {"mlp": (20, 200)}  # else 6 turns of one step


@dataclass(frozen=True)
class Step:
    """*Units*: seconds per step of a row, and of the baseline at that time."""

    seconds: float
    baseline_s: float


Measure = Callable[[Step], float]


@dataclass(frozen=True)
class Searched:
    """``chosen``: by each start, and how long it took, in seconds. ``predicted``: by each start that did not run a row;
    ``measured``: in each round. ``behind``: the seconds of each row that was chosen over the best's."""

    model: str
    batch: int
    chosen: tuple[tuple[str, float], ...]
    predicted: dict[str, list[Step]]
    measured: dict[str, list[Step]]
    behind: dict[str, Spread] = field(default_factory=dict)

    def errors(self, of: Measure) -> dict[str, float]:
        return {
            row: _median(said, of) / _median(self.measured[row], of) - 1
            for row, said in self.predicted.items()
            if said and row in self.measured
        }

    @property
    def best(self) -> str:
        return min(self.measured, key=lambda row: _median(self.measured[row], relative))

    def table(self) -> str:
        lines = [
            "| row | predicted s, if not run | measured s | error | of the baseline | measured | error |",
            "|---|---|---|---|---|---|---|",
        ]
        for row, each in self.measured.items():
            times = [row for row, _ in self.chosen].count(row)
            columns = [f"{row}, chosen {times} times" if times else row]
            for of, digits in ((seconds, 4), (relative, 3)):
                for some in (self.predicted.get(row, []), each):
                    columns.append(" ".join(f"{of(one):.{digits}f}" for one in some) or "-")
                error = self.errors(of).get(row)
                columns.append("-" if error is None else f"{error:+.1%}")
            lines.append(f"| {' | '.join(columns)} |")
        return "\n".join(lines)


def seconds(step: Step) -> float:
    return step.seconds


def relative(step: Step) -> float:
    return step.seconds / step.baseline_s


def _median(steps: Sequence[Step], of: Measure) -> float:
    return statistics.median(map(of, steps))


def search(rounds: int, show: Show, jobs: tuple[tuple[str, int], ...] = JOBS) -> Iterator[Finding]:
    """Raises ValueError where the baseline of a job, or what was chosen, does not run."""
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
    for of, unit in ((seconds, "in seconds"), (relative, "relative to the baseline")):
        errors = sorted(abs(error) for one in found for error in one.errors(of).values())
        if not errors:
            return
        middle, most = statistics.median(errors), errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        what = f"predicted against measured, {unit}, {len(errors)} rows of {len(found)} models that were not run"
        yield Finding("search", f"{what}: median error", f"{middle:.1%}", f"<= {MEDIAN:.0%}", middle <= MEDIAN)
        yield Finding("search", f"{what}: 90th percentile", f"{most:.1%}", f"<= {P90:.0%}", most <= P90)


def searched(model: str, batch: int, rounds: int, show: Show) -> Searched:
    command, starts = [str(Path(job.__file__)), model, str(batch)], list[tuple[str, float]]()
    predicted: dict[str, list[Step]] = {}
    for _ in range(STARTS):
        begin = time.perf_counter()
        with _without_shelf():
            made = planner.make(command, show=lambda doing: show(f"{model} b{batch}: plan: {doing}"), patient=True)
        starts.append((made.chosen, time.perf_counter() - begin))
        for row in made.rows:
            predicted.setdefault(row.engine, [])
            if row.measured_s is None and row.predicted_s and row.speedup:
                predicted[row.engine].append(Step(row.predicted_s, row.predicted_s * row.speedup))
    rows = [row for row in predicted if allowed(row, "exact")]
    measured = _exhausted(command, rows, rounds, lambda doing: show(f"{model} b{batch}, {doing}"))
    if missing := [row for row, _ in starts if row not in measured]:
        raise ValueError(f"{model} b{batch}: the row that was chosen, {missing[0]}, did not run again")
    ran = {row: measured[row] for row in predicted if row in measured}
    found = Searched(model, batch, tuple(starts), predicted, ran)
    return replace(found, behind={row: _behind(found, row, show) for row, _ in starts})


def _exhausted(command: Sequence[str], rows: list[str], rounds: int, show: Show) -> dict[str, list[Step]]:
    """Each row in new processes, in random order, the baseline before and after it."""
    measured: dict[str, list[Step]] = {}
    for i in range(rounds):
        random.Random(i).shuffle(rows)
        before_s = _baseline_s(command)
        for name in rows:
            show(f"round {i + 1} of {rounds}: {name}")
            trial = measure(command, name, timed_s=TIMED_S)
            after_s = _baseline_s(command)
            if not trial.error:
                measured.setdefault(name, []).append(Step(trial.step_s, (before_s + after_s) / 2))
            before_s = after_s
    return measured


def _baseline_s(command: Sequence[str]) -> float:
    trial = measure(command, BASELINE, timed_s=TIMED_S)
    if trial.error:
        raise ValueError(f"{' '.join(command[1:])}: the baseline did not run beside the others: {trial.error}")
    return trial.step_s


def _behind(found: Searched, row: str, show: Show) -> Spread:
    if row == found.best:
        return EVEN
    rows = [Contender(each, "paceline", each) for each in (row, found.best)]
    duel = fight(found.model, found.batch, rows, DUEL_ROUNDS, DUEL_STEPS.get(found.model, (6, 1)), show)
    return duel.ratio(row, found.best)


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
