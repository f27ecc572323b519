"""What strikes a simulated training, and how it trains: all of it from a seed.

Of even seeds the first fault goes through every message of every way to train, from two ranks to eight, with each kind;
that of odd ones falls anywhere among fewer ranks, which is played sooner. Up to two more strike by chance.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from paceline_bench.simulated.fault_link import DEATH, KINDS, ONE_WAY, PARTITION
from paceline_bench.simulated.scenarios import SAMPLES, WAITING, WAYS, Way, windows

SIZES = (2, 2, 2, 3, 3, 3, 4, 4, 5)  # of odd seeds
UNEVEN = 0.3  # of these, whatever the way
STRIDE = 7919  # from case to case: neighbours have little in common
STORIES = (
    "below the minimum, and back",
    ALL := "all at once",
    TWICE := "the same node twice during recovery",
    FORMING := "a kill while the next generation forms",
    TRANSFER := "a kill while state is sent",
    PARTED := "a partition whose two sides die in turn",
)
BUSY_S, TOGETHER_S, LONG_S = 0.012, 0.004, 60.0  # of virtual time: a training, kills of one moment, a partition
MAX_DIE = 0.8
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
    minimum: int = 0  # of nodes that train, where those that fail are started again; 0: they are not
    strikes: Sequence[tuple[str, int, str]] = ()  # at which of the messages whose name has this word, what strikes
    kills: Mapping[int, float] = field(default_factory=dict)  # by rank, when
    doomed: Mapping[int, float] = field(default_factory=dict)  # the nth joining node, how long after its admission

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

    @property
    def story(self) -> str:
        """Where nodes return."""
        return STORIES[self.seed % len(STORIES)]

    @classmethod
    def of_waiting(cls, seed: int) -> Schedule:
        """Fewer nodes than the minimum are left, or none, and they return."""
        dice, story = random.Random(f"waiting {seed}"), STORIES[seed % len(STORIES)]
        size, samples = dice.choice((2, 2, 3, 3, 4, 5)), dice.choice(SAMPLES)
        minimum = dice.choice((size, size, max(2, size - 1), dice.randint(1, size)))
        faults, strikes, doomed = dict[int, str](), list[tuple[str, int, str]](), dict[int, float]()
        most = max(1, size - 1)  # one survives
        num_killed = size if story == ALL else dice.randint(min(most, size - minimum + 1), most)
        begin_s = dice.uniform(0.0, BUSY_S)
        kills = {each: begin_s + dice.uniform(0.0, TOGETHER_S) for each in dice.sample(range(size), num_killed)}
        if story == TWICE:
            doomed = {i: dice.choice((0.0, dice.uniform(0.0, BUSY_S))) for i in range(dice.randint(1, 3))}
        if story in (FORMING, TRANSFER):
            word = "to meet" if story == FORMING else "state"
            strikes = [(word, dice.randrange(size), dice.choice((DEATH, DEATH, *KINDS)))]
        if story == PARTED:
            faults[dice.randrange(8 * size)] = dice.choice((PARTITION, PARTITION, ONE_WAY))
            kills = {each: dice.uniform(0.0, LONG_S) for each in range(size) if dice.random() < MAX_DIE}
        for _ in range(dice.choice((0, 0, 1))):
            faults.setdefault(dice.randrange(20 * size), dice.choice(KINDS))
        way = dice.choice(list(WAITING))
        more = {"minimum": minimum, "strikes": tuple(strikes), "kills": kills, "doomed": doomed}
        return cls(seed, size, faults, way, samples, **more)  # type: ignore[arg-type]

    @cached_property
    def how(self) -> Way:
        if self.minimum:
            return WAITING[self.way]
        return replace(WAYS[self.way], uneven=True) if self.uneven else WAYS[self.way]

    @cached_property
    def steps(self) -> int:
        return len(windows(self.samples))

    def __str__(self) -> str:
        what = ", ".join(f"{kind} at message {number}" for number, kind in sorted(self.faults.items()))
        way = f"{self.way}, uneven" if self.uneven else self.way
        if self.minimum:
            kills = [f"rank {each} is killed at {when:.4f} s" for each, when in sorted(self.kills.items())]
            doomed = [f"joining node {n} {s:.4f} s after its admission" for n, s in sorted(self.doomed.items())]
            strikes = [f"{kind} at the {nth + 1}. message of {word!r}" for word, nth, kind in self.strikes]
            way = f"{way}, at least {self.minimum} nodes; {self.story}"
            what = "; ".join([*([what] if what else []), *kills, *doomed, *strikes])
        return f"seed {self.seed}: {self.size} ranks, {self.steps} steps, {way}; {what or 'no fault'}"
