"""Forwards the output of hosts: `Lines` prefixes each line with the host's name, `through` buffers it in a process.

`through` ends soon after the program, even if a background process still holds the pipe or the reader has stopped. A
closed laptop reads nothing, and its connection stays open for a quarter of an hour.
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

MAX_LAST_BYTES = 2000  # of `Lines.last`
SRUN_SAYS = b"srun: error: "
MAX_LINE_BYTES = 64 << 20  # a longer line is split
BAR_S = 1.0  # minimum time between two printed states of a progress bar
# escape sequences, and all other control characters except tabs and line ends
CONTROLS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def shown(text: str) -> str:
    """Removes control sequences, with which a host's text could move the cursor or change a terminal's clipboard."""
    return CONTROLS.sub("", text)


class Lines:
    """Copies lines from a file descriptor to a file. ``last``: the beginning of the last line that is not blank.

    With ``result``, a JSON object in the last line goes there, without the host's name. `marked` is true after a line
    that ends with ``mark``, which is removed. ``sink_closed``: the file's reader has ended, and /dev/null replaces it.
    JSON between ``report_prefix`` and the first byte of it is removed from a line and passed to ``on_report``.
    """

    report_prefix = b""
    on_report: Callable[[Any], None]

    def __init__(self, name: str, source: int, out: BinaryIO, result: BinaryIO | None = None, mark: bytes = b""):
        self.last, self.marked, self._mark = "", not mark, mark
        self._head, self._source, self._out, self._partial = f"[{name}] ".encode(), source, out, bytearray()
        self._result, self._pending = result, list[bytes]()
        self.sink_closed, self._last_bar_s = False, -math.inf

    def pass_on(self) -> bool:
        """Reads once. At the end of the input, completes the last line and returns False."""
        data = os.read(self._source, 1 << 16)
        first, end, more = data.partition(b"\n")
        self._partial += first  # only new bytes are searched for the end of the line
        if end or len(self._partial) > MAX_LINE_BYTES or (not data and self._partial):
            *lines, partial = bytes(self._partial), *more.split(b"\n")
            lines = lines if self.marked else self._remove_mark(lines)
            lines = self._extract_reports(lines) if self.report_prefix else lines
            self._partial = bytearray(partial)
            # after an error srun tells the exit code of its task
            last = next((line for line in reversed(lines) if line.strip() and not line.startswith(SRUN_SAYS)), None)
            if last is not None:
                self.last = last[:MAX_LAST_BYTES].decode(errors="replace")
            if lines:
                self._write(lines)
        elif b"\r" in first and self.marked and time.monotonic() - self._last_bar_s > BAR_S:
            self._write_bar()
        if not data:
            self._finish()
        return bool(data)

    def _write_bar(self) -> None:
        """Writes the last complete state of a progress bar, which separates states by carriage returns, as a line."""
        self._last_bar_s = time.monotonic()
        cut = self._partial.rfind(b"\r", 0, -1)  # the end of a line may follow the last byte
        complete = next((state for state in reversed(self._partial[: max(0, cut)].split(b"\r")) if state.strip()), None)
        if complete:
            del self._partial[: cut + 1]
            self._write([bytes(complete)])

    def _remove_mark(self, lines: list[bytes]) -> list[bytes]:
        """Removes the mark from the lines. A login's output without a line end may precede it."""
        found = next((i for i, line in enumerate(lines) if line.endswith(self._mark)), None)
        if found is None:
            return lines
        self.marked = True
        before = lines[found].removesuffix(self._mark)
        return [*lines[:found], *([before] if before else []), *lines[found + 1 :]]

    def _extract_reports(self, lines: list[bytes]) -> list[bytes]:
        """Passes reports on and returns the other lines. A script's output without a line end may precede a report."""
        kept = []
        for line in lines:
            before, prefix, tail = line.partition(self.report_prefix)
            message, end, _ = tail.partition(self.report_prefix[:1])
            if prefix and end:
                with contextlib.suppress(ValueError):
                    self.on_report(json.loads(message))
            if before or not (prefix and end):
                kept.append(before if end else line)
        return kept

    def _write(self, lines: list[bytes]) -> None:
        if self._result:
            lines = self._pending + lines
            self._pending = [lines.pop()]
        try:
            self._out.write(b"".join(self._head + line + b"\n" for line in lines))
            self._out.flush()
        except BrokenPipeError:
            self.sink_closed = True
            with open(os.devnull, "wb") as devnull:
                os.dup2(devnull.fileno(), self._out.fileno())

    def _finish(self) -> None:
        result, self._result = self._result, None
        if result and self._pending and self._pending[0].startswith(b"{") and self._pending[0].rstrip().endswith(b"}"):
            result.write(self._pending[0] + b"\n")
            result.flush()
        else:
            self._write(self._pending)
        self._pending = []


POLL_S = 0.02
MAX_BYTES = 1 << 24  # of each stream, buffered for a slow reader
PART_BYTES = 1 << 16
STOPPED_S = 5.0  # without a byte read, after which the oldest bytes are dropped
LINGER_S = 10.0  # without a byte read, after which the end no longer waits for the reader
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def through(run: Callable[[], int]) -> int:
    """Calls ``run`` in a child process and forwards its stdout and stderr. Returns its exit code.

    Output after the child's end is dropped. If the reader has closed the pipe, output is discarded, so that a run whose
    launcher has ended can still save. For a slow reader the last MAX_BYTES are buffered; at the end this process waits
    LINGER_S for it. Signals are passed on. The child ends when this process does.
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
    while any(sink.pending for sink in sinks.values()) and _poll((), sinks.values(), LINGER_S):
        pass  # as long as the reader continues, however slowly
    return code


class Sink:
    """The destination of one stream; bytes that cannot be written at once are buffered in ``pending``."""

    def __init__(self, number: int):
        self.number, self.pending, self._num_dropped, self._last_write_s = number, bytearray(), 0, time.monotonic()

    @property
    def accepts(self) -> bool:
        """Whether there is room, or the reader has stopped for STOPPED_S, so that the oldest bytes are dropped."""
        return len(self.pending) < MAX_BYTES or time.monotonic() - self._last_write_s > STOPPED_S

    def put(self, data: bytes) -> None:
        if not self.pending:
            self._last_write_s = time.monotonic()
        self.pending += data
        if (more := len(self.pending) - MAX_BYTES) > len(data):
            end = self.pending.find(b"\n", more) + 1 or more  # up to the end of a line
            self._num_dropped += end
            del self.pending[:end]

    def flush(self) -> None:
        """Writes what does not block: PIPE_BUF bytes to a pipe that poll calls writable."""
        if self._num_dropped:
            self.pending[:0] = b"\npaceline: the reader stopped for long; %d bytes are left out\n" % self._num_dropped
            self._num_dropped = 0
        try:
            del self.pending[: os.write(self.number, bytes(self.pending[: select.PIPE_BUF]))]
            self._last_write_s = time.monotonic()
        except OSError:  # the reader has closed the pipe
            self.pending.clear()


def _poll(sources: Iterable[int], sinks: Iterable[Sink], limit_s: float) -> set[int]:
    """Waits up to ``limit_s``, then writes what does not block. Returns the ``sources`` and sinks that were ready."""
    poll, waiting = select.poll(), [sink for sink in sinks if sink.pending]
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
    """Forwards the child's output until it has ended; returns its exit code. ``sinks``: by the pipe read for each."""
    ended, code, sources = 0, 0, list(sinks)
    while True:
        if not ended:
            ended, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else 0
            if ended:
                for number in SIGNALS:
                    signal.signal(number, signal.SIG_IGN)  # the child has ended; signals have no receiver
        open_for = [source for source in sources if sinks[source].accepts]
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
