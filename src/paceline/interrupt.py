"""Ctrl-C and SIGTERM end a run between steps: the signal is noted, and everyone told with the next vote.

HANGUP says that the line to who started this process is broken.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANGUP = signal.SIGHUP


class Stopped(SystemExit):
    """Raised after the step in which everyone learned of a signal. Exit code: 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


class Interrupt:
    """Calls ``note(number)`` at the first of ``signals``; a second one acts as if this were not here. HANGUP may
    come as often as it likes, and is left alone where it is ignored, as under nohup."""

    def __init__(self, note: Callable[[int], None], signals: Sequence[int] = SIGNALS):
        self._note, self._before = note, {}
        if threading.current_thread() is threading.main_thread():
            wanted = [n for n in signals if n != HANGUP or signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._heard) for number in wanted}

    def _heard(self, number: int, _: FrameType | None) -> None:
        self._note(number)
        if number != HANGUP:
            self.close()

    def close(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._heard:
                signal.signal(number, handler)
        self._before = {}
