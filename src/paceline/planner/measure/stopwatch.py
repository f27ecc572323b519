"""Stopwatch inside a process that is timed: warm-up left out, the same last step on every process."""

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
TIMEOUT_FACTOR = 3  # times TIMED_S: then fewer than MIN_STEPS have to do
SHRINKS = (4, 2)  # the whole batch is extrapolated from these parts of it
SHRUNK = (2, 3)  # rows that they have at least: batch norm needs two, and a line two sizes


class Stopwatch:
    """Counts agreed seconds, so that every process of the run stops at the same step.

    A script that ends before there are enough steps is reported with those it had. Every process reports the memory it
    needed, shared pages by its part of them; local rank 0 of the first node reports the times.
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
        """Of a batch with ``rows``, those that the next step shall take."""
        self.rows, turn = max(self.rows, rows), len(self.steps_s) % 2
        return min(rows, max(SHRUNK[turn], rows // SHRINKS[turn])) if self.shrinks else rows

    def resume(self) -> None:
        """The next step is counted from here."""
        self.last = time.perf_counter()

    def tick(self, samples: float, agreed_s: float | None) -> None:
        """After each step: ``agreed_s`` is the same number on all processes, or None where they do not talk: then the
        next number is that of each step since, and those count alike. Raises SystemExit when done."""
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
        """One of them all may have paid for the communication between."""
        steps, self._unagreed = self._unagreed, []
        self.steps_s += [sum(seconds for seconds, _ in steps) / len(steps)] * len(steps)
        self.samples += [samples for _, samples in steps]

    def _warm(self, steps: int) -> None:
        late = self.agreed_s >= self.timed_s and steps >= (len(SHRINKS) if self.shrinks else 1)
        if steps >= WARM_UP_STEPS + self.shrinks or late:
            self.warm_up, self.agreed_s = steps, 0.0
            # all processes are still there: what they share is counted once now, and will be later
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
            # too few steps for a warm-up: the first alone is left out
            warm_up = max(1, min(warm_up, len(self.steps_s) - FEWEST_STEPS * (1 + self.shrinks)))
            report |= {
                "steps_s": self.steps_s[warm_up:],
                "samples": self.samples[warm_up:],
                "num_steps": len(self.steps_s),
                "rows": self.rows,
            }
        write_whole(self.report, json.dumps(report))


def times() -> int:
    """How many times the job's global batch a trial takes: as many rows per node as one node alone has."""
    return int(os.environ.get("PACELINE_TRIAL_TIMES", "1")) if os.environ.get("PACELINE_TRIAL") else 1


def _others_bytes() -> int:
    """What this process shares and others count, less what its own children (loading data) need."""
    shared = _kib("/proc/self/smaps_rollup", "Rss") - _kib("/proc/self/smaps_rollup", "Pss")
    import psutil  # of a trial alone

    children = psutil.Process().children(recursive=True)
    return (shared - sum(_kib(f"/proc/{child.pid}/smaps_rollup", "Pss") for child in children)) * 1024


def _kib(path: str, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
    return 0
