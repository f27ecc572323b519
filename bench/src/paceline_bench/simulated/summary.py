"""What many schedules came to, played by several processes at a time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from paceline_bench.simulated.fault_link import CLASSES
from paceline_bench.simulated.schedule import Schedule
from paceline_bench.simulated.simulate import play

PART = 200  # schedules that a process is given at a time


@dataclass
class Summary:
    """``fired``, ``struck``: how often a class of fault had its effect, and in how many schedules. ``violations``: by
    seed."""

    schedules: int = 0
    seeds: int = 0  # looked at: as many, unless only those of one way were played
    ranks: Counter[int] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    meetings: int = 0
    left_out: int = 0
    given_up: int = 0
    undisturbed: int = 0  # in which no fault had an effect
    stories: Counter[str] = field(default_factory=Counter)  # where nodes return
    starts: Counter[int] = field(default_factory=Counter)  # likewise: of all nodes, in how many schedules
    admitted: int = 0  # nodes that returned, and were sent the state
    violations: dict[int, list[str]] = field(default_factory=dict)

    def add(self, other: Summary) -> Summary:
        both = zip(vars(self).items(), vars(other).values(), strict=True)
        sums: dict[str, Any] = {name: {**a, **b} if name == "violations" else a + b for (name, a), b in both}
        return Summary(**sums)

    @classmethod
    def of(cls, seeds: Iterable[int], waits: bool = False, way: str | None = None) -> Summary:
        """Plays them, or those that train in one ``way``."""
        tally = cls()
        for each in (schedule(seed, waits) for seed in seeds):
            tally.seeds += 1
            if way and each.way != way:
                continue
            seed, outcome = each.seed, play(each)
            if waits:
                tally.stories[outcome.schedule.story] += 1
                tally.starts[outcome.num_starts] += 1
                tally.admitted += outcome.num_admitted
            tally.schedules += 1
            tally.ranks[outcome.schedule.size] += 1
            tally.ways[outcome.schedule.way] += 1
            tally.fired += outcome.fired
            tally.struck += Counter(set(outcome.fired))
            tally.messages += outcome.num_messages
            tally.meetings += outcome.num_meetings
            tally.left_out += outcome.left_out
            tally.given_up += outcome.given_up
            tally.undisturbed += not outcome.fired
            if outcome.violations:
                tally.violations[seed] = outcome.violations
        return tally

    def __str__(self) -> str:
        lines = [
            f"{self.schedules} schedules; ranks: {listed(self.ranks)}; trained: {listed(self.ways)}",
            f"{self.messages} messages; those who were left met {self.meetings} times; {self.left_out} ranks were "
            f"alive and might not go on, in {self.given_up} schedules nobody might; in {self.undisturbed} no fault had "
            f"an effect",
            "   times  schedules  class of fault",
            *(f"{self.fired[kind]:8d}  {self.struck[kind]:9d}  {kind}" for kind in CLASSES),
            *(
                [f"{listed(self.stories)}; starts: {listed(self.starts)}; {self.admitted} nodes returned"]
                * bool(self.starts)
            ),
            f"{len(self.violations)} schedules broke a law",
        ]
        return "\n".join(lines)


def schedule(seed: int, waits: bool = False) -> Schedule:
    return Schedule.of_waiting(seed) if waits else Schedule.of(seed)


def listed(counts: Counter[Any]) -> str:
    return ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))


def tally(
    first: int,
    count: int,
    processes: int = 1,
    seconds: float | None = None,
    show: Callable[[Summary], None] = lambda so_far: None,
    waits: bool = False,
    way: str | None = None,
) -> Summary:
    """Seeds from ``first`` on: ``count`` of them, or as many, without a gap, as are begun in so many seconds. ``way``:
    only those that train so."""
    end = time.monotonic() + (seconds or float("inf"))
    seeds = range(first, first + count)
    parts = (seeds[start : start + PART] for start in range(0, count, PART))
    whole, running = Summary(), set[Future[Summary]]()
    if processes == 1:
        for part in parts:
            if time.monotonic() < end:
                show(whole := whole.add(Summary.of(part, waits, way)))
        return whole
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for core in range(processes):
        cores.put(core)
    with ProcessPoolExecutor(processes, context, _begin, (cores,)) as pool:
        while True:
            while len(running) < processes and time.monotonic() < end and (part := next(parts, seeds[:0])):
                running.add(pool.submit(Summary.of, part, waits, way))
            if not running:
                return whole
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                whole = whole.add(each.result())
            show(whole)


def _begin(cores: Any) -> None:
    """One thread runs at a time, so it stays on one core: handing on to a thread on another takes twice as
    long. What has been imported is not searched for garbage again."""
    here = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {here[cores.get() % len(here)]})
    gc.freeze()
