"""Many simulated trainings under faults, or one of them again: python -m paceline.bench.simulated --seed 7.

--seed N                   one, with its whole history
--count N [--first N]      many; ends with status 1 if a schedule broke a law, and says which seeds
--processes N              that play them at the same time
--record FOLDER            writes README.md and raw.json there
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import torch

from paceline.bench.schedule import Schedule, play
from paceline.link.faults import CLASSES
from paceline.probe.survey import survey

BATCH = 250  # schedules that a process is given at a time


@dataclass
class Tally:
    """What many schedules came to. ``violations``: by seed."""

    schedules: int = 0
    ranks: Counter[int] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    meetings: int = 0
    left_out: int = 0
    undisturbed: int = 0  # in which no fault had an effect
    violations: dict[int, list[str]] = field(default_factory=dict)

    def add(self, other: Tally) -> Tally:
        return Tally(
            self.schedules + other.schedules,
            self.ranks + other.ranks,
            self.fired + other.fired,
            self.messages + other.messages,
            self.meetings + other.meetings,
            self.left_out + other.left_out,
            self.undisturbed + other.undisturbed,
            {**self.violations, **other.violations},
        )

    @classmethod
    def of(cls, seeds: Iterable[int]) -> Tally:
        """Plays them."""
        tally = cls()
        for seed in seeds:
            outcome = play(Schedule.of(seed))
            tally.schedules += 1
            tally.ranks[outcome.schedule.size] += 1
            tally.fired += outcome.fired
            tally.messages += outcome.num_messages
            tally.meetings += outcome.num_meetings
            tally.left_out += outcome.left_out
            tally.undisturbed += not outcome.fired
            if outcome.violations:
                tally.violations[seed] = outcome.violations
        return tally

    def __str__(self) -> str:
        sizes = ", ".join(f"{n} of {size}" for size, n in sorted(self.ranks.items()))
        lines = [
            f"{self.schedules} schedules; ranks: {sizes}",
            f"{self.messages} messages; those who were left met {self.meetings} times; {self.left_out} ranks were "
            f"alive and too late; in {self.undisturbed} schedules no fault had an effect",
            *(f"  {self.fired[kind]:8d}  {kind}" for kind in CLASSES),
            f"{len(self.violations)} schedules broke a law",
        ]
        return "\n".join(lines)


def tally(first: int, count: int, processes: int = 1) -> Tally:
    if processes == 1:
        return Tally.of(range(first, first + count))
    parts = [range(start, min(start + BATCH, first + count)) for start in range(first, first + count, BATCH)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return reduce(Tally.add, pool.map(Tally.of, parts), Tally())


def record(folder: Path, found: Tally, command: str, seconds: float) -> None:
    """README.md for people, raw.json for whoever computes with it."""
    machine = survey()
    fired = "\n".join(f"| {kind} | {found.fired[kind]} |" for kind in CLASSES)
    sizes = ", ".join(f"{n} of {size}" for size, n in sorted(found.ranks.items()))
    broken = "\n".join(f"- seed {seed}: {'; '.join(said)}" for seed, said in sorted(found.violations.items())[:50])
    text = f"""# Simulated faults: {found.schedules} schedules, {len(found.violations)} broke a law

Real engine, exchange, loop and data over a link in memory, whose time is virtual and on which a fault strikes at each
message in turn: what happens is a function of the seed. Numbers of ranks: {sizes}.
{found.messages} messages; those who were left met {found.meetings} times; {found.left_out} ranks were alive and came
too late for a meeting; in {found.undisturbed} schedules no fault had an effect.

| class of fault | had its effect |
|---|---|
{fired}

Laws, after each schedule: no torn step; every sample of each global batch once; no deadlock; replicas bit-equal after
every step; within 1e-9 of plain PyTorch in float64.

{broken or "No schedule broke a law."}

**Environment.** {machine.cpu}, {machine.cores} cores, Python {platform.python_version()}, torch {torch.__version__};
{seconds:.0f} s.

**Command**: `{command}`; one of them again, with its history: `python -m paceline.bench.simulated --seed N`.
"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(text)
    (folder / "raw.json").write_text(json.dumps({**vars(found), "seconds": seconds}) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("paceline.bench.simulated", description="Simulated trainings under faults.")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        outcome = play(Schedule.of(asked.seed))
        print(outcome.schedule, *outcome.history, *(f"VIOLATION: {each}" for each in outcome.violations), sep="\n")
        return bool(outcome.violations)
    begin = time.perf_counter()
    found = tally(asked.first, asked.count, asked.processes)
    seconds = time.perf_counter() - begin
    print(found)
    print(f"{seconds:.1f} s, {found.schedules / seconds:.0f} schedules per second")
    for seed, said in sorted(found.violations.items())[:20]:
        print(f"seed {seed}: {'; '.join(said)}")
    if asked.record:
        record(asked.record, found, "make chaos", seconds)
    return bool(found.violations)


if __name__ == "__main__":
    sys.exit(main())
