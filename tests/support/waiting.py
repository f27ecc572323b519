"""Waiting for what other threads do, with an end; time that passes only where a test says so; and time as a process has
it, which does not pass while other programs have its core."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(what: Callable[[], Any], limit_s: float = 20.0) -> Any:
    """What it finally is, other than nothing."""
    end = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


class VirtualTime:
    """In a module's place for `time`: what it measures is exactly what was slept, on however busy a machine."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        return self.now_s

    monotonic = time = perf_counter


class OwnTime:
    """Seconds since this was made, without those for which a process was ready to run and no core was free.

    What waits too long for something is found on a busy machine as well; what the machine keeps waiting is not blamed.
    Of several processes, as if each had waited for the one before.
    """

    def __init__(self, *pids: int):
        self._paths = [Path(f"/proc/{pid}/schedstat") for pid in pids or [os.getpid()]]
        self._kept_s = [0.0] * len(self._paths)
        self._start_s = time.monotonic() - self._kept()

    def _kept(self) -> float:
        """By their first threads; of a process that has ended, what was seen last."""
        for i, path in enumerate(self._paths):
            with contextlib.suppress(OSError, IndexError):  # it has ended, or this kernel does not count
                self._kept_s[i] = int(path.read_text().split()[1]) / 1e9
        return sum(self._kept_s)

    def passed_s(self) -> float:
        """To be asked often, as long as they live."""
        return time.monotonic() - self._start_s - self._kept()
