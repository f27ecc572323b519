"""Pending operations of torch.distributed: groups of works, long waits for gloo, and the errors of failed works."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from paceline import transport
from paceline.errors import LinkError

QUIET_S = 0.05  # in which gloo's threads release the last tensors, for which they need the GIL
TIMEOUT_S = 1800.0  # the heartbeat detects a failed peer long before this


class All:
    """Several operations, completed when all are."""

    def __init__(self, works: list[Any]):
        self.works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self, timeout: timedelta) -> None:
        for work in self.works:
            work.wait(timeout)


class Patient:
    """Gloo aborts a send or receive when a wait for it times out: so one thread waits once, with a long time-out."""

    def __init__(self, work: Any):
        self.work = work
        self.error: RuntimeError | None = None
        self.finished = threading.Event()
        threading.Thread(target=self._run, name="paceline mail", daemon=True).start()

    def _run(self) -> None:
        try:
            self.work.wait(timedelta(seconds=TIMEOUT_S))
        except RuntimeError as error:
            self.error = error
        self.finished.set()

    def is_completed(self) -> bool:
        return self.finished.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self.finished.wait(timeout.total_seconds()):
            raise RuntimeError("not yet")
        if self.error:
            raise self.error


class Promise:
    """Calls ``make`` in a thread; `wait` returns its result. Where ``make`` takes too long, the thread is abandoned."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._made: Any = None
        self._error: Exception = RuntimeError("no answer")
        self._thread = threading.Thread(target=self._run, name="paceline promise", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._made = self._make()
            outlive(self._made)
        except Exception as error:
            self._error = error

    def wait(self, limit_s: float) -> Any:
        self._thread.join(limit_s)
        if self._made is None:
            raise self._error
        return self._made


class Done(transport.Handle):
    def __init__(self, result: Any):
        self.result = result

    def done(self) -> bool:
        return True

    def wait(self, deadline_s: float | None = None) -> Any:
        return self.result


def loss(link: transport.Link, peer: int | None, what: str, waited_s: float, error: Exception | None) -> LinkError:
    """The error for an operation that failed. ``peer``: the rank that is known to have failed, if any."""
    detector = link.detector
    if detector and peer is not None:
        name = f"rank {peer} on {link.hosts[peer]}"
        return LinkError(f"lost {name} during {what} (waited {waited_s:.1f} s): it {detector.dead[peer]}", peer)
    if detector and detector.left:
        ranks = ", ".join(f"{r} on {link.hosts[r]}" for r in sorted(detector.left))
        return LinkError(f"waited for {what}, but rank {ranks} has left: its script ended earlier than this one")
    return LinkError(f"lost a peer during {what} (waited {waited_s:.1f} s): {first_line(error)}")


def first_line(error: Exception | None) -> str:
    return str(error).partition("\n")[0][:200]


def outlive(thing: Any) -> None:
    """``thing`` is never destroyed: its destructor may block, and its threads must not run during the shutdown."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
