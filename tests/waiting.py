"""Waiting for what other threads do, with an end."""

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
