"""What this process is doing: set by the thread that trains, read at any time for those who wait for it.

A wait may last as long as ten recent steps, but MIN_S in any case and MAX_S at most, before people are told of it.

Words for a wait that lasts too long: who waits, where, for what, who is not there, and what that one is at.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from paceline.report.log import log

MIN_S, MAX_S = 4.0, 60.0
UNKNOWN_S = 30.0  # before a step has been measured
BETWEEN_S = 12.0  # between steps, where one process may do what the others wait for
BACK_S = 6.0  # the same where the others go on without it, and it may come back: wrong costs less, and waiting more
TIMES, RECENT = 10.0, 64  # steps
FRAMES = 16  # of a stack, the innermost
OUTSIDE = "outside of a step, in the script's own code"
# the parts of a step
DATA, GRADIENT, VOTE = "waiting for its data", "computing the gradient", "agreeing on the step"
MEETING, UPDATE, AVERAGE = "meeting those who are left", "updating the weights", "averaging the weights"
REPAIR = "holding replicas together"


class Activity:
    """``step``: its number. *Units*: ``step_s``, ``input_s``: seconds of the last step, and those in which it waited
    for its data. ``signs``: what this machine shows that makes it slow. ``notice`` is told what people should know."""

    def __init__(self, unknown_s: float = UNKNOWN_S) -> None:
        self.host = os.environ.get("PACELINE_HOST", socket.gethostname())
        self.step, self.step_s, self.input_s = 0, 0.0, 0.0
        self.signs: Sequence[str] = ()
        self.notice: Callable[[str], None] = log.warning
        self.watch: Callable[[str, float, float], None] | None = None  # what it was at, from, to; *Units*: perf_counter
        self.siblings: Callable[[], str] = str  # the stacks of the other processes of this node
        self.between_s = BETWEEN_S
        self._thread = threading.get_ident()
        self._inside = False
        self._now = (OUTSIDE, time.monotonic(), False)
        self._wire = ""
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._limit_s = unknown_s
        self._woke: tuple[int, float] | None = None  # in which step, and after how long

    # `begin` to `waiting` are called by the thread that trains, the others by any thread

    def begin(self, step: int) -> None:
        self.step, self._inside, self._thread = step, True, threading.get_ident()

    def end(self, seconds: float, input_s: float) -> None:
        self._inside, self.step_s, self.input_s = False, seconds, input_s
        self._recent.append(seconds)
        ordered = sorted(self._recent)
        self._limit_s = min(MAX_S, max(MIN_S, TIMES * ordered[int(0.95 * (len(ordered) - 1))]))
        self._now = OUTSIDE, time.monotonic(), False

    def at(self, what: str, waits: bool = False) -> At:
        """``with activity.at("computing the gradient"):``. ``waits``: for other nodes."""
        return At(self, what, waits)

    def waiting(self, what: str) -> At:
        """As `at`, for an operation among nodes, which another thread may wait for, too."""
        if threading.get_ident() != self._thread:
            self._wire = what
        return At(self, what, True)

    def woke(self, seconds: float) -> None:
        """This process, or all of its machine, has stood still, or heard nothing of another one, for so long."""
        self._woke = self.step, seconds

    @property
    def doubtful_s(self) -> float:
        """For how long it stood still, as long as the others may have gone on without it: what they sent before may
        still end this step, but not the next one. Otherwise 0."""
        return self._woke[1] if self._woke and self.step - self._woke[0] < 2 else 0.0

    @property
    def limit_s(self) -> float:
        """How long something may take that usually takes a step at most."""
        return self._limit_s if self._inside else max(self._limit_s, self.between_s)

    def tell(self) -> dict[str, Any]:
        what, since_s, waits = self._now
        wire = f": {self._wire}" if waits and self._inside and self._wire and self._wire != what else ""
        return {
            "host": self.host,
            "step": self.step,
            "doing": what + wire,
            "for_s": round(time.monotonic() - since_s, 2),
            "waits": waits,
            "step_s": round(self.step_s, 6),
            "input_s": round(self.input_s, 6),
            "signs": list(self.signs),
        }

    def since(self) -> float | None:
        """Since when, on `time.monotonic`, it has waited for other nodes; None where it does not."""
        _, since_s, waits = self._now
        return since_s if waits else None

    def stack(self) -> str:
        """Of the thread that trains, the innermost frame last."""
        frame = _frames().get(self._thread)
        return "".join(traceback.format_stack(frame)[-FRAMES:]) if frame else ""

    def stacks(self) -> str:
        """Of all processes of this node, as far as they are known here."""
        return self.stack() + self.siblings()


_LOOKING = threading.Lock()
# a child that was forked meanwhile would never collect its garbage
os.register_at_fork(before=_LOOKING.acquire, after_in_parent=_LOOKING.release, after_in_child=_LOOKING.release)


def _frames() -> Mapping[int, FrameType]:
    """Of all threads. A collection of garbage in the middle of it, which meets a threading.local, would wait for ever
    for a lock that this very thread holds, and all other threads with it (Python before 3.12.1, gh-106883)."""
    with _LOOKING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


class At:
    """Within, the thread that trains is at ``what``; other threads are not asked."""

    __slots__ = ("_before", "_begin_s", "_what", "_where")

    def __init__(self, where: Activity, what: str, waits: bool):
        self._where, self._what = where, (what, waits)
        self._before: tuple[str, float, bool] | None = None
        self._begin_s = 0.0

    def __enter__(self) -> None:
        if self._where.watch:
            self._begin_s = time.perf_counter()
        if threading.get_ident() == self._where._thread:
            self._before, self._where._now = self._where._now, (self._what[0], time.monotonic(), self._what[1])

    def __exit__(self, *_: object) -> None:
        if self._before:
            self._where._now = self._before[0], time.monotonic(), self._before[2]
            if self._where.watch and self._begin_s:
                self._where.watch(self._what[0], self._begin_s, time.perf_counter())


SILENT_S = 2.5  # without a sign of life, which comes every second
UNANSWERED = "its process does not answer, so its stack cannot be had: stopped, swapped out, or starved"
SAME_CALLS = "makes the same calls in every process (count by pace.num_steps, which a late node knows, too)"

Told = Mapping[int, Mapping[str, Any]]  # by rank: what it said of itself, and for how long it has been silent


def missing(everyone: Told, rank: int) -> list[int]:
    """Who is not waiting for the others as ``rank`` is."""
    return [other for other, told in everyone.items() if other != rank and not (told["waits"] and answers(told))]


def answers(told: Mapping[str, Any]) -> bool:
    return float(told.get("silent_s", 0.0)) < SILENT_S


def state(rank: int, told: Mapping[str, Any]) -> str:
    """One of them, in a line."""
    who = f"rank {rank} on {told['host']}"
    if not answers(told):
        return f"{who}, silent for {told['silent_s']:.0f} s (at step {told['step']} before: {told['doing']})"
    took = f"; a step took {told['step_s']:.3g} s" if told["step_s"] else ""
    return f"{who}, at step {told['step']}: {told['doing']}, for {told['for_s']:.1f} s{took}"


def line(everyone: Told, rank: int, size: int, absent: Sequence[int]) -> str:
    """What ``rank`` has waited for, and for whom."""
    mine = everyone[rank]
    said = (
        f"rank {rank} of {size} on {mine['host']} at step {mine['step']} has waited {mine['for_s']:.0f} s for others "
        f"in {mine['doing']}"
    )
    if absent:
        return f"{said}; not there: {', and '.join(state(other, everyone[other]) for other in absent)}"
    others = ", ".join(state(other, told) for other, told in everyone.items() if other != rank)
    places = {(told["step"], told["doing"]) for told in everyone.values()}
    script = f", or, as they are not in the same place, at whether the script {SAME_CALLS}" if len(places) > 1 else ""
    return f"{said}; all others wait as well, so look at the network between them{script}: {others}"


def stacks(everyone: Told, absent: Sequence[int], found: Mapping[int, str]) -> list[str]:
    """Where each of those who are not there stands in its code."""
    lines = []
    for rank in absent:
        who = f"rank {rank} on {everyone[rank]['host']}"
        stack = found.get(rank, "").rstrip()
        lines += [f"{who} stands here:", *stack.splitlines()] if stack else [f"{who}: {UNANSWERED}"]
    return lines
