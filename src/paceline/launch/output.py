"""Output of hosts in whole lines, each with the host's name before it.

Output by way of a process between: it keeps nobody waiting.

Neither a pipe that something left behind still holds, nor a reader who has stopped: a laptop that was closed reads
nothing, and its line stays open for a quarter of an hour.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from paceline.launch.child_processes import end_with

MAX_LAST_BYTES = 2000  # bytes of `last`
LONGEST = 64 << 20  # of a line, which then is cut
BAR_S = 1.0  # between two states of a progress bar that are shown
# sequences that begin with an escape, whole, and every other character that is a control, but tabs and ends of lines
CONTROLS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def shown(text: str) -> str:
    """Without what would move a terminal's cursor or change its colours, title or clipboard: hosts wrote some of it."""
    return CONTROLS.sub("", text)


class Lines:
    """From a file descriptor to a file; ``last`` is how the last line that says something begins.

    With ``result``, a last line that is a JSON object goes there instead, without a name. Where a line ends with
    ``mark``, that is left out, and `marked` from then on. ``unheard``: nobody reads the file, which leads nowhere now.
    What stands in a line between ``says`` and the first byte of that is JSON for ``hear``, and left out as well.
    """

    says = b""
    hear: Callable[[Any], None]

    def __init__(self, name: str, source: int, out: BinaryIO, result: BinaryIO | None = None, mark: bytes = b""):
        self.last, self.marked, self._mark = "", not mark, mark
        self._head, self._source, self._out, self._rest = f"[{name}] ".encode(), source, out, bytearray()
        self._result, self._held = result, list[bytes]()
        self.unheard, self._drawn_s = False, -math.inf

    def pass_on(self) -> bool:
        """Reads once. False at the end, when a line without an end gets one."""
        data = os.read(self._source, 1 << 16)
        first, end, others = data.partition(b"\n")
        self._rest += first  # a line that has not ended yet is not searched again with each part of it that comes
        if end or len(self._rest) > LONGEST or (not data and self._rest):
            *lines, rest = bytes(self._rest), *others.split(b"\n")
            lines = lines if self.marked else self._unmarked(lines)
            lines = self._heard(lines) if self.says else lines
            self._rest = bytearray(rest)
            telling = next((line for line in reversed(lines) if line.strip()), None)
            if telling is not None:
                self.last = telling[:MAX_LAST_BYTES].decode(errors="replace")
            if lines:
                self._write(lines)
        elif b"\r" in first and self.marked and time.monotonic() - self._drawn_s > BAR_S:
            self._draw()
        if not data:
            self._finish()
        return bool(data)

    def _draw(self) -> None:
        """A bar says each of its states after a return, and ends no line: the last whole one as a line of its own."""
        self._drawn_s = time.monotonic()
        cut = self._rest.rfind(b"\r", 0, -1)  # the end of a line may follow the last byte
        whole = next((state for state in reversed(self._rest[: max(0, cut)].split(b"\r")) if state.strip()), None)
        if whole:
            del self._rest[: cut + 1]
            self._write([bytes(whole)])

    def _unmarked(self, lines: list[bytes]) -> list[bytes]:
        """What a login says without an end may stand before the mark."""
        found = next((i for i, line in enumerate(lines) if line.endswith(self._mark)), None)
        if found is None:
            return lines
        self.marked = True
        before = lines[found].removesuffix(self._mark)
        return [*lines[:found], *([before] if before else []), *lines[found + 1 :]]

    def _heard(self, lines: list[bytes]) -> list[bytes]:
        """What a script writes without an end may stand before."""
        left = []
        for line in lines:
            before, sign, said = line.partition(self.says)
            words, end, _ = said.partition(self.says[:1])
            if sign and end:
                with contextlib.suppress(ValueError):
                    self.hear(json.loads(words))
            if before or not (sign and end):
                left.append(before if end else line)
        return left

    def _write(self, lines: list[bytes]) -> None:
        if self._result:
            lines = self._held + lines
            self._held = [lines.pop()]
        try:
            self._out.write(b"".join(self._head + line + b"\n" for line in lines))
            self._out.flush()
        except BrokenPipeError:
            self.unheard = True
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._out.fileno())

    def _finish(self) -> None:
        result, self._result = self._result, None
        if result and self._held and self._held[0].startswith(b"{") and self._held[0].rstrip().endswith(b"}"):
            result.write(self._held[0] + b"\n")
            result.flush()
        else:
            self._write(self._held)
        self._held = []


POLL_S = 0.02
MAX_BYTES = 1 << 24  # of each stream, that are kept for who does not read
PART_BYTES = 1 << 16
STOPPED_S = 5.0  # without a byte read, before the oldest are given up
LINGER_S = 10.0  # at the end, for who reads nothing
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def through(run: Callable[[], int]) -> int:
    """Calls ``run`` in a child, whose stdout and stderr come out of this process's. Returns its exit code.

    What is written until its end comes out, and nothing later. Where nobody reads any more, it goes nowhere, so that a
    run whose launcher is gone can save in peace; for who does not read for a while, the last MAX_BYTES are kept, and
    at the end for LINGER_S. Signals are passed on; the child ends when this process does.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pipes = {1: os.pipe(), 2: os.pipe()}
    parent, child = os.getpid(), os.fork()
    if not child:
        code = 70
        try:
            end_with(parent)
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
    while any(sink.waits for sink in sinks.values()) and _poll((), sinks.values(), LINGER_S):
        pass  # to a reader that reads on, however slowly
    return code


class Sink:
    """Where one stream goes; what cannot be written at once is kept."""

    def __init__(self, number: int):
        self.number, self.waits, self._lost, self._moved_s = number, bytearray(), 0, time.monotonic()

    @property
    def takes(self) -> bool:
        """More than MAX_BYTES, and then without the oldest, where nobody has read for long."""
        return len(self.waits) < MAX_BYTES or time.monotonic() - self._moved_s > STOPPED_S

    def put(self, data: bytes) -> None:
        if not self.waits:
            self._moved_s = time.monotonic()
        self.waits += data
        if (more := len(self.waits) - MAX_BYTES) > len(data):
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


def _poll(sources: Iterable[int], sinks: Iterable[Sink], limit_s: float) -> set[int]:
    """Writes what is taken at once. Returns the ``sources`` that can be read, and the sinks that were written to."""
    poll, waiting = select.poll(), [sink for sink in sinks if sink.waits]
    for source in sources:
        poll.register(source, select.POLLIN)
    for sink in waiting:
        poll.register(sink.number, select.POLLOUT)
    ready = {number for number, _ in poll.poll(1000 * limit_s)}
    for sink in waiting:
        if sink.number in ready:
            sink.flush()
    return ready


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
        ready = _poll(open_for, sinks.values(), 0 if ended and not full else POLL_S)
        for source in ready.intersection(open_for):
            data = os.read(source, PART_BYTES)
            if data:
                sinks[source].put(data)
            else:
                sources.remove(source)
        if ended and not full and not ready.intersection(open_for):
            return code if code >= 0 else 128 - code
