"""What strikes a simulated training, and how it trains: all of it from a seed.

Of even seeds the first fault goes through every message of every way to train, from two ranks to eight, with each kind;
that of odd ones falls anywhere among fewer ranks, which is played sooner. Up to two more strike by chance.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from paceline.bench.simulated.ways import SAMPLES, WAYS, Way, windows
from paceline.link.faults import KINDS

SIZES = (2, 2, 2, 3, 3, 3, 4, 4, 5)  # of odd seeds
UNEVEN = 0.3  # of these, whatever the way
STRIDE = 7919  # from case to case: neighbours have little in common
Case = tuple[int, str, int, str]  # ranks, way, message, kind


@cache
def cases() -> list[Case]:
    """What strikes first, of even seeds: one after the other, but in strides."""
    longest = len(windows(max(SAMPLES)))
    return [
        (size, name, message, kind)
        for size in range(2, 9)
        for name, way in WAYS.items()
        for message in range(way.num_messages(size, longest))
        for kind in KINDS
    ]


@dataclass(frozen=True)
class Schedule:
    """``faults``: by the number of the message, which kind. ``way``: of `WAYS`; ``uneven``: in unlike shares, too."""

    seed: int
    size: int
    faults: Mapping[int, str]
    way: str = "factors"
    samples: int = 36
    uneven: bool = False

    @classmethod
    def of(cls, seed: int) -> Schedule:
        dice = random.Random(f"schedule {seed}")
        lap, place = divmod(seed // 2, len(cases()))
        samples, kind = SAMPLES[~lap % len(SAMPLES)], dice.choice(KINDS)
        if seed % 2:
            size, samples = dice.choice(SIZES), dice.choice(SAMPLES)
            (way,) = dice.choices(list(WAYS), [way.share for way in WAYS.values()])
            message = dice.randrange(WAYS[way].num_messages(size, len(windows(samples))))
        else:
            size, way, message, kind = cases()[place * STRIDE % len(cases())]
        faults = {message: kind}
        for _ in range(dice.choice((0, 0, 1, 1, 2))):
            faults.setdefault(dice.randrange(20 * size), dice.choice(KINDS))
        return cls(seed, size, faults, way, samples, bool(seed % 2) and dice.random() < UNEVEN)

    @cached_property
    def how(self) -> Way:
        return replace(WAYS[self.way], uneven=True) if self.uneven else WAYS[self.way]

    @cached_property
    def steps(self) -> int:
        return len(windows(self.samples))

    def __str__(self) -> str:
        what = ", ".join(f"{kind} at message {number}" for number, kind in sorted(self.faults.items()))
        way = f"{self.way}, uneven" if self.uneven else self.way
        return f"seed {self.seed}: {self.size} ranks, {self.steps} steps, {way}; {what or 'no fault'}"
