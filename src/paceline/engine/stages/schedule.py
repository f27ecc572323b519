"""Schedules of a pipeline: which stage computes which micro-batch when, as data.

    gpipe   all forward passes, then all backward passes
    1f1b    stage s of k has at most k - s micro-batches in flight: then a backward and a forward pass in turn

*Use*: ``python -m paceline.engine.stages.schedule 2 8 1f1b`` prints 2 stages and 8 micro-batches.
*Invariants*: each stage computes every micro-batch forward and backward once, in the order of their numbers; a forward
pass follows that of the stage before, a backward pass that of the stage after.
*Source*: Huang et al. 2019 (arXiv 1811.06965); Narayanan et al. 2019 (doi 10.1145/3341301.3359646), section 3.2, with
all updates after the last backward pass.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"
TIMEOUT_S = 1800.0  # for the passes before this one
BACKWARD_TICKS = 2  # of a backward pass, where a forward pass takes one


class Pass(NamedTuple):
    kind: str
    micro: int


Schedule = Sequence[Sequence[Pass]]  # of each stage, its passes in order


def gpipe(stages: int, micros: int) -> Schedule:
    each = [Pass(kind, micro) for kind in (FORWARD, BACKWARD) for micro in range(micros)]
    return [each] * stages


def one_forward_one_backward(stages: int, micros: int) -> Schedule:
    found = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, micros)
        passes = [Pass(FORWARD, micro) for micro in range(ahead)]
        for micro in range(micros - ahead):
            passes += [Pass(FORWARD, ahead + micro), Pass(BACKWARD, micro)]
        found.append([*passes, *(Pass(BACKWARD, micro) for micro in range(micros - ahead, micros))])
    return found


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def ends(schedule: Schedule, seconds: Callable[[int, Pass], float]) -> dict[tuple[int, Pass], float]:
    """When each pass of each stage ends, if none waits for anything but its order and the passes that it needs."""
    found, positions, free = dict[tuple[int, Pass], float](), [0] * len(schedule), [0.0] * len(schedule)
    while any(position < len(passes) for position, passes in zip(positions, schedule, strict=True)):
        moved = False
        for stage, passes in enumerate(schedule):
            if positions[stage] == len(passes):
                continue
            one = passes[positions[stage]]
            needs = [(stage - 1, one)] if one.kind == FORWARD else [(stage + 1, one), (stage, Pass(FORWARD, one.micro))]
            needs = [(other, each) for other, each in needs if 0 <= other < len(schedule)]
            if all(need in found for need in needs):
                free[stage] = max([free[stage], *(found[need] for need in needs)]) + seconds(stage, one)
                found[stage, one], moved = free[stage], True
                positions[stage] += 1
        if not moved:
            raise ValueError("the schedule waits for itself")
    return found


def step_s(schedule: Schedule, seconds: Callable[[int, Pass], float]) -> float:
    return max(ends(schedule, seconds).values())


def in_flight(schedule: Schedule) -> list[int]:
    """Of each stage, the largest number of micro-batches whose activations it holds at once."""
    most = []
    for passes in schedule:
        held = [0]
        for one in passes:
            held.append(held[-1] + (1 if one.kind == FORWARD else -1))
        most.append(max(held))
    return most


def table(schedule: Schedule) -> str:
    """A line for each stage, of ticks: F0 is a forward pass of micro-batch 0, B0 B0 its backward pass; then the part of
    all ticks in which stages are idle."""
    ticks = {FORWARD: 1, BACKWARD: BACKWARD_TICKS}
    found = ends(schedule, lambda _, one: ticks[one.kind])
    length = int(max(found.values()))
    rows = [["."] * length for _ in schedule]
    for (stage, one), end in found.items():
        for tick in range(int(end) - ticks[one.kind], int(end)):
            rows[stage][tick] = f"{one.kind}{one.micro}"
    width = max(len(cell) for row in rows for cell in row)
    lines = [f"stage {i}  " + " ".join(cell.ljust(width) for cell in row).rstrip() for i, row in enumerate(rows)]
    idle = sum(row.count(".") for row in rows) / (length * len(rows))
    held = ", ".join(map(str, in_flight(schedule)))
    return "\n".join([*lines, f"{length} ticks, {idle:.0%} idle; micro-batches in flight: {held}"])


class Cancelled(RuntimeError):
    """Another micro-batch failed."""


class Turns:
    """Lets one thread into a stage at a time, in the order of the schedule."""

    def __init__(self, schedule: Schedule):
        self.schedule, self.next, self.failed = schedule, [0] * len(schedule), False
        self.condition = threading.Condition()
        self.seconds: dict[tuple[int, Pass], float] = {}
        self._begin = [0.0] * len(schedule)

    def enter(self, stage: int, wanted: Pass) -> None:
        with self.condition:
            due = self.condition.wait_for(lambda: self.failed or self._due(stage) == wanted, TIMEOUT_S)
            if self.failed:
                raise Cancelled("another micro-batch of the pipeline has failed")
            if not due:
                raise RuntimeError(f"pass {wanted} of stage {stage} did not begin within {TIMEOUT_S:.0f} s")
        self._begin[stage] = time.perf_counter()

    def _due(self, stage: int) -> Pass | None:
        passes = self.schedule[stage]
        return passes[self.next[stage]] if self.next[stage] < len(passes) else None

    def leave(self, stage: int) -> None:
        with self.condition:
            done = self._due(stage)
            assert done
            self.seconds[stage, done] = time.perf_counter() - self._begin[stage]
            self.next[stage] += 1
            self.condition.notify_all()

    def fail(self) -> None:
        with self.condition:
            self.failed = True
            self.condition.notify_all()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prints the table of a pipeline's schedule.")
    parser.add_argument("stages", type=int, choices=range(1, 65), metavar="STAGES")
    parser.add_argument("micros", type=int, choices=range(1, 257), metavar="MICRO-BATCHES")
    parser.add_argument("schedule", choices=SCHEDULES)
    asked = parser.parse_args()
    print(table(SCHEDULES[asked.schedule](asked.stages, asked.micros)))
