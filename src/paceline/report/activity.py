"""Activity of this process: set by the training thread, and sent to the processes that wait for it.

A wait that lasts longer than ten recent steps is reported to the user; the limit is at least MIN_S and at most MAX_S.
The report names the waiting rank, its step and operation, the absent ranks, and the activity of each absent rank.
"""

from __future__ import annotations

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

from paceline.data.collection import collection_off
from paceline.report.log import log

MIN_S, MAX_S = 4.0, 60.0
UNKNOWN_S = 30.0  # before a step has been measured
BETWEEN_S = 12.0  # between steps, where one process may work while the others wait
BACK_S = 6.0  # the same in an elastic run, where survivors continue and the process may rejoin: a mistake costs less
FACTOR, RECENT = 10.0, 64  # steps
FRAMES = 16  # innermost frames shown of a stack
OUTSIDE = "outside of a step, in the script's own code"
# the parts of a step
DATA, GRADIENT, VOTE = "waiting for its data", "computing the gradient", "agreeing on the step"
RENDEZVOUS, UPDATE, AVERAGE = "rendezvous with the survivors", "updating the weights", "averaging the weights"
REPAIR = "re-broadcasting the weights"


class Activity:
    """``step``: its number. *Units*: ``step_s``, ``input_s``: seconds of the last step, and its wait for data in them.
    ``symptoms``: possible reasons why this machine is slow. ``notice`` receives messages for the user."""

    def __init__(self, unknown_s: float = UNKNOWN_S) -> None:
        self.host = os.environ.get("PACELINE_HOST", socket.gethostname())
        self.step, self.step_s, self.input_s = 0, 0.0, 0.0
        self.symptoms: Sequence[str] = ()
        self.notice: Callable[[str], None] = log.warning
        self.watch: Callable[[str, float, float], None] | None = None  # (doing, from, to), *Units*: perf_counter
        self.siblings: Callable[[], str] = str  # the stacks of the other processes of this node
        self.between_s = BETWEEN_S
        self._thread = threading.get_ident()
        self._inside = False
        self._state = (OUTSIDE, time.monotonic(), False)
        self._collective = ""
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._limit_s = unknown_s
        self._suspended: tuple[int, float] | None = None  # (step, seconds) of the last suspension

    # `begin` to `waiting` are called by the training thread, the other methods by any thread

    def begin(self, step: int) -> None:
        self.step, self._inside, self._thread = step, True, threading.get_ident()

    def end(self, seconds: float, input_s: float) -> None:
        self._inside, self.step_s, self.input_s = False, seconds, input_s
        self._recent.append(seconds)
        ordered = sorted(self._recent)
        self._limit_s = min(MAX_S, max(MIN_S, FACTOR * ordered[int(0.95 * (len(ordered) - 1))]))
        self._state = OUTSIDE, time.monotonic(), False

    def at(self, doing: str, waits: bool = False) -> At:
        """``with activity.at("computing the gradient"):``. ``waits``: for other nodes."""
        return At(self, doing, waits)

    def waiting(self, doing: str) -> At:
        """Like `at`, for a collective operation, which another thread may also wait for."""
        if threading.get_ident() != self._thread:
            self._collective = doing
        return At(self, doing, True)

    def note_suspension(self, seconds: float) -> None:
        """This process or its machine was suspended, or received nothing from another process, for ``seconds``."""
        self._suspended = self.step, seconds

    @property
    def suspended_s(self) -> float:
        """How long it was suspended, while the others may have continued without it; otherwise 0. Messages sent before
        the suspension may still complete this step, but not the next one."""
        return self._suspended[1] if self._suspended and self.step - self._suspended[0] < 2 else 0.0

    @property
    def limit_s(self) -> float:
        """The time limit of an operation that usually takes at most one step."""
        return self._limit_s if self._inside else max(self._limit_s, self.between_s)

    def status(self) -> dict[str, Any]:
        doing, since_s, waits = self._state
        collective = self._collective if waits and self._inside and self._collective != doing else ""
        return {
            "host": self.host,
            "step": self.step,
            "doing": f"{doing}: {collective}" if collective else doing,
            "for_s": round(time.monotonic() - since_s, 2),
            "waits": waits,
            "step_s": round(self.step_s, 6),
            "input_s": round(self.input_s, 6),
            "signs": list(self.symptoms),
        }

    def since(self) -> float | None:
        """The `time.monotonic` at which its wait for other nodes began; None where it does not wait."""
        _, since_s, waits = self._state
        return since_s if waits else None

    def stack(self) -> str:
        """The stack of the training thread, the innermost frame last."""
        frame = _frames().get(self._thread)
        return "".join(traceback.format_stack(frame)[-FRAMES:]) if frame else ""

    def stacks(self) -> str:
        """The stacks of all known processes of this node."""
        return self.stack() + self.siblings()


def _frames() -> Mapping[int, FrameType]:
    """The frames of all threads. A garbage collection during the call that frees a threading.local would deadlock this
    thread on a lock that it holds, and with it all other threads (Python before 3.12.1, gh-106883)."""
    with collection_off():
        return sys._current_frames()


class At:
    """Context in which the training thread is ``doing`` something; it has no effect in other threads."""

    __slots__ = ("_activity", "_begin_s", "_doing", "_previous")

    def __init__(self, activity: Activity, doing: str, waits: bool):
        self._activity, self._doing = activity, (doing, waits)
        self._previous: tuple[str, float, bool] | None = None
        self._begin_s = 0.0

    def __enter__(self) -> None:
        if self._activity.watch:
            self._begin_s = time.perf_counter()
        if threading.get_ident() == self._activity._thread:
            self._previous = self._activity._state
            self._activity._state = self._doing[0], time.monotonic(), self._doing[1]

    def __exit__(self, *_: object) -> None:
        if self._previous:
            self._activity._state = self._previous[0], time.monotonic(), self._previous[2]
            if self._activity.watch and self._begin_s:
                self._activity.watch(self._doing[0], self._begin_s, time.perf_counter())


SILENT_S = 2.5  # without a heartbeat, which is sent every second
UNANSWERED = "its process does not respond, so its stack is unknown: it is stopped, swapped out, or starved of CPU time"
SAME_CALLS = "makes the same calls in every process (count by pace.num_steps, which a joining node knows, too)"

Statuses = Mapping[int, Mapping[str, Any]]  # by rank: its last status, and for how long it has been silent


def absent_ranks(statuses: Statuses, rank: int) -> list[int]:
    """The ranks that do not wait for the others, as ``rank`` does."""
    return [other for other, status in statuses.items() if other != rank and not (status["waits"] and responds(status))]


def responds(status: Mapping[str, Any]) -> bool:
    return float(status.get("silent_s", 0.0)) < SILENT_S


def state(rank: int, status: Mapping[str, Any]) -> str:
    """The status of one rank, in a line."""
    name = f"rank {rank} on {status['host']}"
    if not responds(status):
        return f"{name}, silent for {status['silent_s']:.0f} s (at step {status['step']} before: {status['doing']})"
    usual = f"; a step took {status['step_s']:.3g} s" if status["step_s"] else ""
    return f"{name}, at step {status['step']}: {status['doing']}, for {status['for_s']:.1f} s{usual}"


def line(statuses: Statuses, rank: int, size: int, absent: Sequence[int]) -> str:
    """The operation that ``rank`` waits in, and the ranks that it waits for."""
    own = statuses[rank]
    text = (
        f"rank {rank} of {size} on {own['host']} at step {own['step']} has waited {own['for_s']:.0f} s for others "
        f"in {own['doing']}"
    )
    if absent:
        return f"{text}; not there: {', and '.join(state(other, statuses[other]) for other in absent)}"
    others = ", ".join(state(other, status) for other, status in statuses.items() if other != rank)
    positions = {(status["step"], status["doing"]) for status in statuses.values()}
    script = f", and, as their operations differ, whether the script {SAME_CALLS}" if len(positions) > 1 else ""
    return f"{text}; all others wait as well, so check the network between them{script}: {others}"


def stacks(statuses: Statuses, absent: Sequence[int], found: Mapping[int, str]) -> list[str]:
    """The stack of each absent rank, as lines."""
    lines = []
    for rank in absent:
        name = f"rank {rank} on {statuses[rank]['host']}"
        stack = found.get(rank, "").rstrip()
        lines += [f"{name} is executing:", *stack.splitlines()] if stack else [f"{name}: {UNANSWERED}"]
    return lines
