"""Stopwatch inside a timed process: excludes warm-up, and ends every process after the same step."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from paceline.report.record import write_whole

WARM_UP_STEPS = 3
FEWEST_STEPS, MIN_STEPS, MAX_STEPS = 2, 8, 200
TIMED_S = 2.5
TIMEOUT_FACTOR = 3  # times TIMED_S: after that, fewer than MIN_STEPS suffice
SHRINKS = (4, 2)  # divisors of the batch: the time of the whole batch is extrapolated from these two parts
SHRUNK = (2, 3)  # minimum samples of these parts: batch norm needs two, and extrapolation two sizes


class Stopwatch:
    """Counts seconds that all processes agreed on, so that every process of the run stops after the same step.

    If the script ends too early, the steps so far are reported. Every process reports its peak memory, without the
    shared pages that others count; local rank 0 of the first node reports the times.
    """

    def __init__(self, report: Path | None, leader: bool = True, timed_s: float = TIMED_S, shrinks: bool = False):
        self.report, self.leader, self.timed_s, self.shrinks = report, leader, timed_s, shrinks
        self.steps_s: list[float] = []
        self.samples: list[float] = []
        self.warm_up = 0
        self.rows = 0
        self.agreed_s = 0.0
        self._unagreed: list[tuple[float, float]] = []  # (seconds, samples) of steps since the last agreed number
        self._others_bytes = 0
        self._reported = False
        if report:
            atexit.register(self.write)
        self.last = time.perf_counter()

    @classmethod
    def of_environment(cls, leader: bool) -> Stopwatch | None:
        path = os.environ.get("PACELINE_TRIAL")
        if not path:
            return None
        report = Path(path) if leader else Path(f"{path}.{os.getpid()}")
        timed_s = float(os.environ.get("PACELINE_TRIAL_S", TIMED_S))
        return cls(report, leader, timed_s, os.environ.get("PACELINE_TRIAL_SHRINKS") == "1")

    def part(self, rows: int) -> int:
        """How many of ``rows`` samples the next step computes."""
        self.rows, turn = max(self.rows, rows), len(self.steps_s) % 2
        return min(rows, max(SHRUNK[turn], rows // SHRINKS[turn])) if self.shrinks else rows

    def resume(self) -> None:
        """Starts the time of the next step now."""
        self.last = time.perf_counter()

    def tick(self, samples: float, agreed_s: float | None) -> None:
        """Called after each step. ``agreed_s``: the same on all processes, or None after a step without communication;
        the next number then counts for each step since the last one. Raises SystemExit when done."""
        self._unagreed.append((time.perf_counter() - self.last, samples))
        if agreed_s is not None:
            self.agreed_s += agreed_s * len(self._unagreed)
            self._count()
            if not self.warm_up:
                self._warm(len(self.steps_s))
            elif self._enough(len(self.steps_s) - self.warm_up):
                self.write()
                raise SystemExit(0)
        self.resume()

    def _count(self) -> None:
        """Averages the steps since the last agreed number: a single one may contain all their communication."""
        steps, self._unagreed = self._unagreed, []
        self.steps_s += [sum(seconds for seconds, _ in steps) / len(steps)] * len(steps)
        self.samples += [samples for _, samples in steps]

    def _warm(self, steps: int) -> None:
        late = self.agreed_s >= self.timed_s and steps >= (len(SHRINKS) if self.shrinks else 1)
        if steps >= WARM_UP_STEPS + self.shrinks or late:
            self.warm_up, self.agreed_s = steps, 0.0
            # all processes still run: their shared pages are measured now, to be counted once in the report
            self._others_bytes = _others_bytes() if self.report else 0

    def _enough(self, timed: int) -> bool:
        many, fewest = (MIN_STEPS, FEWEST_STEPS) if not self.shrinks else (2 * MIN_STEPS, 2 * FEWEST_STEPS)
        return (
            (self.agreed_s >= self.timed_s and timed >= many)
            or (self.agreed_s >= TIMEOUT_FACTOR * self.timed_s and timed >= fewest)
            or timed >= MAX_STEPS
        )

    def write(self) -> None:
        if self._reported or not self.report:
            return
        self._reported = True
        if self._unagreed:
            self._count()
        report: dict[str, Any] = {"peak_bytes": max(0, _kib("/proc/self/status", "VmHWM") * 1024 - self._others_bytes)}
        if self.leader:
            warm_up = self.warm_up or len(self.steps_s)
            # too few steps for a full warm-up: at least the first step is excluded
            warm_up = max(1, min(warm_up, len(self.steps_s) - FEWEST_STEPS * (1 + self.shrinks)))
            report |= {
                "steps_s": self.steps_s[warm_up:],
                "samples": self.samples[warm_up:],
                "num_steps": len(self.steps_s),
                "rows": self.rows,
            }
        write_whole(self.report, json.dumps(report))


def times() -> int:
    """The factor of a trial's global batch over the job's: for weak scaling, the number of nodes."""
    return int(os.environ.get("PACELINE_TRIAL_TIMES", "1")) if os.environ.get("PACELINE_TRIAL") else 1


def _others_bytes() -> int:
    """Shared pages that other processes count, less the memory of this process's children (data loading)."""
    shared = _kib("/proc/self/smaps_rollup", "Rss") - _kib("/proc/self/smaps_rollup", "Pss")
    import psutil  # imported late: only trials need it

    children = psutil.Process().children(recursive=True)
    return (shared - sum(_kib(f"/proc/{child.pid}/smaps_rollup", "Pss") for child in children)) * 1024


def _kib(path: str, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
    return 0
