"""Programs that this one asks and waits for, which end when it does: at its own end, at Ctrl-C, at SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any


class Calls:
    """While this is entered, SIGTERM is an exit like any other; at its end, whatever still runs is killed."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[Any]] = []
        self._lock, self._over = threading.Lock(), False
        self._before: Any = None

    def __enter__(self) -> Calls:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _leave)
        return self

    def start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """In a session of its own: a terminal's Ctrl-C comes here alone. Whoever starts it closes its pipes."""
        with self._lock:
            if self._over:
                raise InterruptedError("nothing is started any more")
            process = subprocess.Popen(command, start_new_session=True, **how)
            self._running.append(process)
            return process

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
        for process in self._running:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what ssh itself started, as well
        for process in self._running:
            process.wait()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
