"""Many simulated trainings under faults, or one of them again: python -m paceline_bench.simulated --seed 7.

--seed N                   one, with its whole history
--count N [--first N]      many; ends with status 1 if a schedule broke a law, and says which seeds
--seconds S                as many of them as are begun in that time
--way NAME                 those among them that train so: hybrid, server, diloco, ...
--waits                    histories in which nodes that fail return: below the minimum and back, all at once, ...
--processes N              that play them at the same time, each on a core of its own
--record FOLDER            writes README.md and raw.json there
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.launch.machine import survey
from paceline_bench.simulated.fault_link import CLASSES
from paceline_bench.simulated.scenarios import WAYS
from paceline_bench.simulated.simulate import play
from paceline_bench.simulated.summary import Summary, listed, schedule, tally

WAITS = """Nodes that fail are started again, join those who wait, and are sent the state; where nobody is left who has
it, all are started from the newest checkpoint. All with batch norm over all nodes, and clipped. No step is applied
below the minimum of nodes.

"""
EVERY_S = 10.0  # a line of progress


def record(folder: Path, found: Summary, command: str, first: int, seeds: str, seconds: float) -> None:
    """README.md for people, raw.json for whoever computes with it."""
    machine = survey()
    fired = "\n".join(f"| {kind} | {found.struck[kind]} | {found.fired[kind]} |" for kind in CLASSES)
    broken = "\n".join(f"- seed {seed}: {'; '.join(said)}" for seed, said in sorted(found.violations.items())[:50])
    text = f"""# Simulated faults: {found.schedules} schedules, {len(found.violations)} broke a law

Real engine, exchange, loop and data over a link in memory, whose time is virtual and on which a fault strikes at each
message in turn: what happens is a function of the seed, and the seeds are {seeds}.

Numbers of ranks: {listed(found.ranks)}. How they trained: {listed(found.ways)}.
{found.messages} messages; those who were left met {found.meetings} times; {found.left_out} ranks were alive and might
not go on, as the rules say, and in {found.given_up} schedules nobody might; in {found.undisturbed} no fault had an
effect.

| class of fault | schedules | times that it had its effect |
|---|---|---|
{fired}

Laws, after each schedule: no torn step; every sample of each global batch once; no deadlock; nobody who could be
reached is left out; of parts that do not hear each other one at most goes on; replicas bit-equal after every step;
within 1e-9 of plain PyTorch in float64, or as near as 16 bits are; reproducible ones the bits of one rank alone; with
error feedback nothing lost or applied twice but what the lost ones owed.

{WAITS if found.starts else ""}{broken or "No schedule broke a law."}

**Environment.** {machine.cpu}, {machine.cores} cores, Python {platform.python_version()}, torch {torch.__version__};
{seconds:.0f} s, {found.schedules / seconds:.0f} schedules per second.

**Command**: `{command}`; one of them again, with its history: `--seed N` in place of `--count` and what follows.
"""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(text)
    (folder / "raw.json").write_text(json.dumps({**vars(found), "first": first, "seconds": seconds}) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("paceline_bench.simulated", description="Simulated trainings under faults.")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        outcome = play(schedule(asked.seed, asked.waits))
        print(outcome.schedule, *outcome.history, *(f"VIOLATION: {each}" for each in outcome.violations), sep="\n")
        return bool(outcome.violations)
    begin = last = time.perf_counter()

    def show(so_far: Summary) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last > EVERY_S:
            last, each = now, so_far.schedules / (now - begin)
            broke = f", {len(so_far.violations)} broke a law: {sorted(so_far.violations)[:5]}"
            words = f"{so_far.schedules} of {asked.count} schedules, {each:.0f} per second"
            print(words + (broke if so_far.violations else ""), file=sys.stderr)

    found = tally(asked.first, asked.count, asked.processes, asked.seconds, show, asked.waits, asked.way)
    seconds = time.perf_counter() - begin
    print(found)
    print(f"{seconds:.1f} s, {found.schedules / seconds:.0f} schedules per second")
    for seed, said in sorted(found.violations.items())[:20]:
        print(f"seed {seed}: {'; '.join(said)}")
    if found.seeds < asked.count:
        print(f"the next are those from --first {asked.first + found.seeds} on")
    if asked.record:
        given = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(["python", "-m", "paceline_bench.simulated", *given])
        seeds = f"{asked.first} to {asked.first + found.seeds - 1}"
        seeds += f", of which these train as {asked.way!r}" if asked.way else ""
        record(asked.record, found, command, asked.first, seeds, seconds)
    return bool(found.violations)


if __name__ == "__main__":
    sys.exit(main())
