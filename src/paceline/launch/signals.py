"""Ctrl-C and SIGTERM end a run between steps: a process notes the signal, and sends it to all with its next vote.

HANGUP means that the connection to the launcher of this process has failed.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANGUP = signal.SIGHUP
RESUME_CODE = 75  # EX_TEMPFAIL, the exit code of a process that must not continue by itself: resume the run
AGAIN_S = 0.3  # a repetition of a signal within this time is ignored


class Stopped(SystemExit):
    """Raised after the step in which all processes received the signal. Exit code: 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


class Resume(Stopped):
    """Raised after saving, if training cannot continue now but can be resumed. Exit code: RESUME_CODE."""

    def __init__(self) -> None:
        SystemExit.__init__(self, RESUME_CODE)
        self.number = 0


OPEN: set[Interrupt] = set()


class Interrupt:
    """Calls ``note(number)`` at the first of ``signals``, and restores the previous handlers for the next one. A
    repetition within AGAIN_S is ignored: at a shutdown the system sends a signal to every process, and the launcher
    passes it on again. HANGUP is noted every time, and stays ignored if it was, as under nohup."""

    def __init__(self, note: Callable[[int], None], signals: Sequence[int] = SIGNALS):
        self._note, self._previous, self._has_noted = note, {}, False
        if threading.current_thread() is threading.main_thread():
            wanted = [n for n in signals if n != HANGUP or signal.getsignal(n) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._handle) for number in wanted}
            OPEN.add(self)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == HANGUP:
            self._note(number)
        elif not self._has_noted:
            self._has_noted = True
            self._note(number)
            time.sleep(AGAIN_S)  # repetitions meanwhile call this handler, and change nothing
            self.close()

    def close(self) -> None:
        """Restores the previous handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
            for newer in tuple(OPEN):  # its close() would restore this handler
                if newer._previous.get(number) == self._handle:
                    newer._previous[number] = handler
        self._previous = {}
        OPEN.discard(self)
