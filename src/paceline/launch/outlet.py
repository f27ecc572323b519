"""Output by way of a process between: it keeps nobody waiting.

Neither a pipe that something left behind still holds, nor a reader who has stopped: a laptop that was closed reads
nothing, and its line stays open for a quarter of an hour.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence

PR_SET_PDEATHSIG = 1
GLANCE_S = 0.02
MOST_BYTES = 1 << 24  # of each stream, that are kept for who does not read
PART_BYTES = 1 << 16
STOPPED_S = 5.0  # without a byte read, before the oldest are given up
LINGER_S = 10.0  # at the end, for who reads nothing
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

_libc = ctypes.CDLL(None, use_errno=True)


def through(run: Callable[[], int]) -> int:
    """Calls ``run`` in a child, whose stdout and stderr come out of this process's. Returns its exit code.

    What is written until its end comes out, and nothing later. Where nobody reads any more, it goes nowhere, so that a
    run whose launcher is gone can save in peace; for who does not read for a while, the last MOST_BYTES are kept, and
    at the end for LINGER_S. Signals are passed on; the child ends when this process does.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pipes = {1: os.pipe(), 2: os.pipe()}
    parent, child = os.getpid(), os.fork()
    if not child:
        code = 70
        try:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(143)
            for number, (source, sink) in pipes.items():
                os.dup2(sink, number)
                os.close(source)
                os.close(sink)
            code = run()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    for _, sink in pipes.values():
        os.close(sink)
    sinks = {source: Sink(number) for number, (source, _) in pipes.items()}
    code = _pump(sinks, child)
    _drain(list(sinks.values()))
    return code


class Sink:
    """Where one stream goes; what cannot be written at once is kept."""

    def __init__(self, number: int):
        self.number, self.waits, self._lost, self._moved_s = number, bytearray(), 0, time.monotonic()

    @property
    def takes(self) -> bool:
        """More than MOST_BYTES, and then without the oldest, where nobody has read for long."""
        return len(self.waits) < MOST_BYTES or time.monotonic() - self._moved_s > STOPPED_S

    def put(self, data: bytes) -> None:
        if not self.waits:
            self._moved_s = time.monotonic()
        self.waits += data
        if (more := len(self.waits) - MOST_BYTES) > len(data):
            end = self.waits.find(b"\n", more) + 1 or more  # the rest of a line as well
            self._lost += end
            del self.waits[:end]

    def flush(self) -> None:
        """As much as is taken at once: of a pipe that has room for anything, a page."""
        if self._lost:
            self.waits[:0] = b"\npaceline: nobody read for long; %d bytes are left out\n" % self._lost
            self._lost = 0
        try:
            del self.waits[: os.write(self.number, bytes(self.waits[: select.PIPE_BUF]))]
            self._moved_s = time.monotonic()
        except OSError:  # nobody ever will read
            self.waits.clear()


def _ready(sources: Iterable[int], sinks: Iterable[Sink], limit_s: float) -> set[int]:
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    for sink in sinks:
        if sink.waits:
            poll.register(sink.number, select.POLLOUT)
    return {number for number, _ in poll.poll(1000 * limit_s)}


def _pump(sinks: dict[int, Sink], child: int) -> int:
    """``sinks``: by what comes for each."""
    ended, code, sources = 0, 0, list(sinks)
    while True:
        if not ended:
            ended, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else 0
            if ended:
                for number in SIGNALS:
                    signal.signal(number, signal.SIG_IGN)  # there is nobody to pass them on to
        open_for = [source for source in sources if sinks[source].takes]
        full = len(open_for) < len(sources)
        ready = _ready(open_for, sinks.values(), 0 if ended and not full else GLANCE_S)
        for sink in sinks.values():
            if sink.number in ready and sink.waits:
                sink.flush()
        for source in ready.intersection(open_for):
            data = os.read(source, PART_BYTES)
            if data:
                sinks[source].put(data)
            else:
                sources.remove(source)
        if ended and not full and not ready.intersection(open_for):
            return code if code >= 0 else 128 - code


def _drain(sinks: Sequence[Sink]) -> None:
    """To whoever reads on, however slowly."""
    while any(sink.waits for sink in sinks):
        ready = _ready((), sinks, LINGER_S)
        if not ready:
            return
        for sink in sinks:
            if sink.number in ready and sink.waits:
                sink.flush()
