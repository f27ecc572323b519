"""Faults on real nodes, as root: python -m paceline_bench.chaos --faults 200 --seed 1.

--faults N --seed N        so many, in as many trainings as they need; the first has that seed
--only WORDS               classes of faults, separated by commas, by how their names begin
--nodes N --epochs N       of each training
--ways server,hybrid       how they are parallel, by turns: allreduce (the default), server, diloco, hybrid
--record FOLDER            writes README.md and raw.json there
--waits N --seed N         instead: trainings that go below the minimum of nodes, or lose all; needs no root
--against torchrun,horovod instead: what a killed node costs, here and there

Ends with status 1 where a law was broken, a run hung, or ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paceline_bench.chaos import below_minimum, campaign, recovery_time, summary
from paceline_bench.chaos.faults import CLASSES
from paceline_bench.chaos.ways import ALLREDUCE, WAYS


def chosen(words: str | None) -> list[str]:
    """Classes by how their names begin. Raises ValueError."""
    if not words:
        return list(CLASSES)
    begins = [word.strip() for word in words.split(",")]
    if strange := [word for word in begins if not any(kind.startswith(word) for kind in CLASSES)]:
        raise ValueError(f"no class of faults begins with {', '.join(strange)}; known: {', '.join(CLASSES)}")
    return [kind for kind in CLASSES if any(kind.startswith(word) for word in begins)]


def show(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("paceline_bench.chaos", description="Real trainings under real faults.")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--ways", default=ALLREDUCE)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--against")
    parser.add_argument("--waits", type=int)
    asked = parser.parse_args(arguments)
    begin = time.perf_counter()
    try:
        if asked.waits:
            words = f"python -m paceline_bench.chaos {' '.join(arguments or sys.argv[1:])}"
            return below_minimum.waits(asked.waits, asked.seed, asked.record, words, show)
        kinds = chosen(asked.only)
        if asked.against:
            return recovery_time.compare(
                asked.against.split(","), asked.faults, asked.seed, asked.nodes, asked.record, show
            )
        ways = asked.ways.split(",")
        if strange := [way for way in ways if way not in WAYS]:
            raise ValueError(f"no way named {', '.join(strange)}; known: {', '.join(WAYS)}")
        outcomes, trainings = campaign.suffer(
            asked.faults, asked.seed, kinds, asked.nodes, asked.epochs, show, ways=ways
        )
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    print(summary.table(outcomes))
    if asked.record:
        words = f"python -m paceline_bench.chaos {' '.join(arguments or sys.argv[1:])}"
        summary.record(asked.record, outcomes, trainings, words, time.perf_counter() - begin)
    return bool(summary.failed(outcomes))


if __name__ == "__main__":
    sys.exit(main())
