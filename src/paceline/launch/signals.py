"""Ctrl-C and SIGTERM end a run between steps: the signal is noted, and sent to all with the next vote.

HANGUP says that the line to who started this process is broken.
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
AGAIN_S = 0.3  # in which a signal that comes again is the same one


class Stopped(SystemExit):
    """Raised after the step in which everyone learned of a signal. Exit code: 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


class Resume(Stopped):
    """Raised where training cannot continue for now, once all is saved. Exit code: RESUME_CODE."""

    def __init__(self) -> None:
        SystemExit.__init__(self, RESUME_CODE)
        self.number = 0


OPEN: set[Interrupt] = set()


class Interrupt:
    """Calls ``note(number)`` at the first of ``signals``; a second one acts as if this were not here. One that comes
    within AGAIN_S is no second one: what ends a service or a machine reaches every process, and the launcher passes it
    on besides. HANGUP may come as often as it likes, and is left alone where it is ignored, as under nohup."""

    def __init__(self, note: Callable[[int], None], signals: Sequence[int] = SIGNALS):
        self._note, self._before, self._noted = note, {}, False
        if threading.current_thread() is threading.main_thread():
            wanted = [n for n in signals if n != HANGUP or signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._heard) for number in wanted}
            OPEN.add(self)

    def _heard(self, number: int, _: FrameType | None) -> None:
        if number == HANGUP:
            self._note(number)
        elif not self._noted:
            self._noted = True
            self._note(number)
            time.sleep(AGAIN_S)  # those that come meanwhile are heard here, and change nothing
            self.close()

    def close(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._heard:
                signal.signal(number, handler)
            for later in tuple(OPEN):  # which would put this one back
                if later._before.get(number) == self._heard:
                    later._before[number] = handler
        self._before = {}
        OPEN.discard(self)
