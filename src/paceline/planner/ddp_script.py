"""A script that uses DistributedDataParallel, timed with torch's class and with ours, on one machine."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.ddp import import_hook
from paceline.planner.measure.fresh_process import run_in_process
from paceline.registry import PROCESSES

USES = re.compile(
    r"\b(DistributedDataParallel|init_process_group|TrainingArguments)\b"
    r"|^\s*(?:from|import)\s+(accelerate|lightning|pytorch_lightning)\b",
    re.MULTILINE,
)
LIMIT_S = 600.0


def used(command: Sequence[str]) -> str:
    """What of torch's or a library's data parallelism a script uses that knows nothing of paceline; else empty."""
    if command[0] == "-m":
        return ""
    text = Path(command[0]).read_text(errors="replace")
    found = USES.search(text)
    return (found[1] or found[2]) if found and "paceline" not in text else ""


@dataclass(frozen=True)
class Timing:
    """*Units*: seconds from one forward pass to the next, of the slowest rank. ``rows``: of a rank's pass; 0: unknown.
    ``error``: why it could not be timed."""

    name: str
    ranks: int
    step_s: float = 0.0
    rows: int = 0
    error: str = ""

    def words(self, base: Timing) -> str:
        if self.error:
            return f"{self.name}: {self.error}"
        batch = f", global batch {self.ranks * self.rows}" if self.rows else ""
        text = f"{self.name}: {self.step_s:.4g} s per step{batch}"
        if base is self or not base.step_s:
            return text
        samples = self.ranks * base.step_s / (base.ranks * self.step_s)
        return f"{text}, {samples:.2f}x the samples per second"


def timings(command: Sequence[str], ranks: int, show: Callable[[str], None]) -> list[Timing]:
    """One process, then ``ranks`` of them with torch's class and with ours."""
    found = [_timed(command, "1 process", 1, import_hook.TORCHS, show)]
    if ranks > 1:
        found.append(_timed(command, f"{ranks} processes, torch's class", ranks, import_hook.TORCHS, show))
        found.append(_timed(command, f"{ranks} processes, paceline's class", ranks, "", show))
    return found


def _timed(command: Sequence[str], name: str, ranks: int, kind: str, show: Callable[[str], None]) -> Timing:
    show(f"trying {name}")
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "said.json"
        launch = [sys.executable, "-m", "paceline", "run", "--plan", f"{PROCESSES}:{ranks}"]
        ended = run_in_process([*launch, *command], {import_hook.TIMED: str(path), import_hook.VARIABLE: kind}, LIMIT_S)
        if path.exists():
            return Timing(name, **{"ranks": ranks, **json.loads(path.read_text())})
    if ended.code is None:
        return Timing(name, ranks, error=f"18 passes took more than {LIMIT_S:.0f} s")
    return Timing(name, ranks, error=f"it ended before 18 passes under DistributedDataParallel ({ended.last_line})")


def report(found: Sequence[Timing], cores: int) -> list[str]:
    """Lines for people; what `join` would add is the last."""
    lines = [one.words(found[0]) for one in found]
    if len(found) > 2 and found[1].step_s and found[2].step_s:
        lines.append(f"paceline's class: {found[1].step_s / found[2].step_s:.2f}x torch's")
    if os.environ.get("OMP_NUM_THREADS") is None and len(found) > 1:
        lines.append(f"each process had its part of {cores} cores")
    lines.append(
        "paceline.join in place of the wrapper: plans with other engines, one global batch for any number of machines, "
        "training that survives lost nodes (docs/from-ddp.md)"
    )
    return lines
