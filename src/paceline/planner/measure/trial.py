"""Trial of one configuration: the command itself in fresh processes, timed and stopped after a few steps.

The planner calls `measure`, which starts the command with PACELINE_TRIAL set to the path of a report. In the command's
process, a `Stopwatch` in `pace.step` excludes warm-up, times enough steps, writes the report and ends the process.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.launch.child_processes import ScratchFolder
from paceline.planner.measure.fresh_process import ProcessResult, run_in_process
from paceline.planner.measure.stopwatch import FEWEST_STEPS, MIN_STEPS, TIMED_S

LIMIT_S = 120.0
NOTCH = 1.57  # times the interquartile range over the root of the number of steps


@dataclass(frozen=True)
class Trial:
    """*Units*: median seconds per step, and its uncertainty; samples/s; bytes of all processes.

    *Source* of the spread: the notch of McGill, Tukey & Larsen 1978 (The American Statistician 32:12): medians whose
    notches do not overlap differ. For fewer than MIN_STEPS steps the spread is the range.
    """

    engine: str
    step_s: float = float("inf")
    spread_s: float = 0.0
    per_s: float = 0.0
    peak_bytes: int = 0
    error: str = ""
    extrapolated: bool = False
    late: bool = False  # the time limit ended it
    steps_s: tuple[float, ...] = field(default=(), repr=False)


def measure(
    command: Sequence[str], engine: str, *, timed_s: float = TIMED_S, limit_s: float = LIMIT_S, shrinks: bool = False
) -> Trial:
    """Runs ``command`` (what follows `paceline run`) with an engine. After a failure, the Trial has an error.
    ``shrinks``: extrapolates long steps from parts of each batch; for one process only."""
    with ScratchFolder() as folder:
        report = Path(folder) / "trial.json"
        given = {"PACELINE_TRIAL": str(report), "PACELINE_TRIAL_S": str(timed_s)}
        given |= {"PACELINE_TRIAL_SHRINKS": f"{shrinks:d}"}
        started = [sys.executable, "-m", "paceline", "run", "--engine", engine, *command]
        return result_of(engine, run_in_process(started, given, limit_s), report, limit_s, shrinks)


def result_of(engine: str, ended: ProcessResult, report: Path, limit_s: float, shrinks: bool = False) -> Trial:
    """The trial from the reports that a run's stopwatches wrote to the folder of ``report``."""
    if ended.code is None:
        return Trial(engine, error=f"no {FEWEST_STEPS} steps within {limit_s:.0f} s", late=True)
    if ended.code or not report.exists():
        return Trial(engine, error=ended.last_line if ended.code else "the script ended without a step")
    times = json.loads(report.read_text())
    peaks = [json.loads(other.read_text())["peak_bytes"] for other in report.parent.glob(f"{report.name}*")]
    if len(times["steps_s"]) < FEWEST_STEPS:
        return Trial(engine, error=f"the script ended after {times['num_steps']} steps; 3 are needed to time one")
    step_s, spread_s, rows = _whole(times) if shrinks else _plain(times)
    return Trial(engine, step_s, spread_s, rows / step_s, sum(peaks), "", shrinks, steps_s=tuple(times["steps_s"]))


def merge(trials: Sequence[Trial]) -> Trial:
    """Several trials of one configuration as one; the spread includes the differences between processes."""
    if len(trials) == 1 or any(trial.error for trial in trials):
        return next((trial for trial in trials if trial.error), trials[0])
    medians = [trial.step_s for trial in trials]
    step_s = statistics.median(medians)
    within_s = statistics.fmean(trial.spread_s for trial in trials) / len(trials) ** 0.5
    between_s = (max(medians) - min(medians)) / 2
    return replace(
        trials[0],
        step_s=step_s,
        spread_s=max(within_s, between_s),
        per_s=statistics.median(trial.per_s for trial in trials),
        peak_bytes=max(trial.peak_bytes for trial in trials),
        steps_s=tuple(step for trial in trials for step in trial.steps_s),
    )


def _median(steps: Sequence[float]) -> tuple[float, float]:
    median = statistics.median(steps)
    if len(steps) < MIN_STEPS:
        return median, max(steps) - min(steps)
    low, _, high = statistics.quantiles(steps, n=4)
    return median, NOTCH * (high - low) / len(steps) ** 0.5


def _plain(times: dict[str, Any]) -> tuple[float, float, float]:
    """(seconds, spread, samples) of full batches only; a shorter last batch is excluded."""
    whole = max(times["samples"])
    steps = [seconds for seconds, rows in zip(times["steps_s"], times["samples"], strict=True) if rows == whole]
    return (*_median(steps), whole)


def _whole(times: dict[str, Any]) -> tuple[float, float, float]:
    """(seconds, spread, samples) of the full batch, extrapolated linearly from the medians of two smaller sizes."""
    sizes, steps = sorted(set(times["samples"])), list(zip(times["steps_s"], times["samples"], strict=True))
    if len(sizes) < 2:
        return _plain(times)
    by_size = [[seconds for seconds, rows in steps if rows == size] for size in sizes]
    (low_s, low_spread), (high_s, high_spread) = _median(by_size[0]), _median(by_size[-1])
    reach = (times["rows"] - sizes[-1]) / (sizes[-1] - sizes[0])
    step_s = max(high_s, high_s + reach * (high_s - low_s))
    return step_s, (1 + reach) * high_spread + reach * low_spread, float(times["rows"])
