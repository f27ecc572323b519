"""Waiting for what other threads do, with an end; and time that passes only where a test says so."""

from __future__ import annotations

import time
from collections.abc import Callable
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
