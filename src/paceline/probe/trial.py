"""One candidate, timed for real: the command itself in fresh processes, stopped after a few steps.

Outside, `measure` starts the command with PACELINE_TRIAL naming a file. Inside, a `Stopwatch` in
`pace.step` leaves out warm-up, times steps until it has enough, writes the file and ends the process.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

WARM_UP_STEPS = 3
MIN_STEPS, MAX_STEPS = 8, 200
TIMED_S = 2.5
LIMIT_S = 120.0
NOTCH = 1.57  # times the interquartile range over the root of the number of steps


@dataclass(frozen=True)
class Trial:
    """*Units*: median seconds per step, and how far off it may be; samples/s; bytes.

    *Source* of the spread: the notch of McGill, Tukey & Larsen 1978 (The American Statistician 32:12): medians whose
    notches do not overlap differ.
    """

    engine: str
    step_s: float = float("inf")
    spread_s: float = 0.0
    per_s: float = 0.0
    peak_bytes: int = 0
    error: str = ""
    steps_s: tuple[float, ...] = field(default=(), repr=False)


def measure(command: Sequence[str], engine: str, limit_s: float = LIMIT_S) -> Trial:
    """Runs ``command`` (what follows `paceline run`) with an engine. A failure is a Trial with an error."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        report = Path(folder) / "trial.json"
        run = [sys.executable, "-m", "paceline", "run", "--engine", engine, *command]
        environment = {**os.environ, "PACELINE_TRIAL": str(report)}
        try:
            done = subprocess.run(
                run,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Trial(engine, error=f"no {MIN_STEPS} steps within {limit_s:.0f} s")
        if not report.exists():
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            return Trial(engine, error=last[0][:300])
        said = json.loads(report.read_text())
    steps = said["steps_s"]
    low, _, high = statistics.quantiles(steps, n=4)
    median = statistics.median(steps)
    return Trial(
        engine,
        median,
        NOTCH * (high - low) / len(steps) ** 0.5,
        said["samples"] / len(steps) / median,
        said["peak_bytes"],
        steps_s=tuple(steps),
    )


class Stopwatch:
    """Counts agreed seconds, so that every process of the run stops at the same step."""

    def __init__(self, report: Path | None):
        self.report = report
        self.steps = self.samples = 0.0
        self.agreed_s = 0.0
        self.steps_s: list[float] = []
        self.last = time.perf_counter()

    @classmethod
    def of_environment(cls, leader: bool) -> Stopwatch | None:
        path = os.environ.get("PACELINE_TRIAL")
        return cls(Path(path) if leader else None) if path else None

    def resume(self) -> None:
        """The next step is counted from here."""
        self.last = time.perf_counter()

    def tick(self, samples: float, agreed_s: float) -> None:
        """After each step: ``agreed_s`` is the same number on all processes. Raises SystemExit when done."""
        elapsed = time.perf_counter() - self.last
        self.resume()
        self.steps += 1
        if self.steps <= WARM_UP_STEPS:
            return
        self.steps_s.append(elapsed)
        self.samples += samples
        self.agreed_s += agreed_s
        enough = self.agreed_s >= TIMED_S and len(self.steps_s) >= MIN_STEPS
        if not enough and len(self.steps_s) < MAX_STEPS:
            return
        if self.report:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            said = {"steps_s": self.steps_s, "samples": self.samples, "peak_bytes": peak}
            aside = self.report.with_suffix(".part")
            aside.write_text(json.dumps(said))
            aside.replace(self.report)
        raise SystemExit(0)
