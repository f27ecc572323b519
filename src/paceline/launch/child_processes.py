"""Child processes that end when this process does: at its own end, at Ctrl-C, at SIGTERM."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO, Any

MAX_BYTES = 1 << 18  # that are kept of a program's output
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class ChildProcesses:
    """While this is entered, SIGTERM is an exit like any other; at its end, what still runs is killed."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[Any]] = []
        self._lock, self._over = threading.Lock(), False
        self._before: Any = None

    def __enter__(self) -> ChildProcesses:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _leave)
        return self

    def start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """In a session of its own: a terminal's Ctrl-C comes here alone. The caller closes its pipes."""
        with self._lock:
            if self._over:
                raise InterruptedError("nothing is started any more")
            process = subprocess.Popen(command, start_new_session=True, **how)
            self._running.append(process)
            return process

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            self._over = True
        for process in self._running:
            kill(process)
        for process in self._running:
            process.wait()
        if self._before is not None:
            # one more on the way out would take the exit code away
            left = isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
            signal.signal(signal.SIGTERM, signal.SIG_IGN if left else self._before)


def end_with(parent: int) -> None:
    """In a process just forked: the end of its parent ends it by SIGTERM, also where that has come already."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(143)


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A folder for what programs answer, which a signal that raises does not leave behind: it waits meanwhile.

    Python's own knows how to remove the folder some time after there is one, and forgets it before it has gone.
    """

    def __init__(self, prefix: str = "paceline-"):
        with _held():
            super().__init__(prefix=prefix)

    def cleanup(self) -> None:
        with _held():
            super().cleanup()


@contextlib.contextmanager
def _held() -> Iterator[None]:
    """Signals that have a handler come at the end. In other threads there is nothing to hold: none runs in them."""
    before: dict[int, Any] = {}
    noted: list[int] = []
    try:
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if callable(handler := signal.getsignal(each)):
                    before[each] = handler
                    signal.signal(each, lambda number, _: noted.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in noted:
            signal.raise_signal(number)


def kill(process: subprocess.Popen[Any]) -> None:
    """With what it started itself, as ssh does: its session is its own."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def piped(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes], IO[bytes]]:
    """A program and its three pipes, in a session of its own: a terminal's Ctrl-C comes to this process alone."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    return process, process.stdin, process.stdout, process.stderr


def received(process: subprocess.Popen[bytes], limit_s: float) -> tuple[str, str]:
    """Its stdout and stderr until it has ended; of each, the last MAX_BYTES. Raises TimeoutError."""
    end = time.monotonic() + limit_s
    output: dict[Any, bytes] = {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as selector:
        for pipe in output:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            left_s = end - time.monotonic()
            ready = selector.select(left_s) if left_s > 0 else []
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                output[key.fileobj] = (output[key.fileobj] + data)[-MAX_BYTES:]
                if not data:
                    selector.unregister(key.fileobj)
    try:
        process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return output[process.stdout].decode(errors="replace"), output[process.stderr].decode(errors="replace")


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
