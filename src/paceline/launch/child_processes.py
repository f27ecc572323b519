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

MAX_BYTES = 1 << 18  # kept of a program's output, the last ones
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class ChildProcesses:
    """Context of child processes: in it SIGTERM raises SystemExit; its exit kills the children that still run."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[Any]] = []
        self._lock, self._closed = threading.Lock(), False
        self._previous: Any = None

    def __enter__(self) -> ChildProcesses:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, _raise_exit)
        return self

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts it in its own session: a terminal's Ctrl-C reaches this process alone. The caller closes its pipes."""
        with self._lock:
            if self._closed:
                raise InterruptedError("this process is ending and starts no more child processes")
            process = subprocess.Popen(command, start_new_session=True, **options)
            self._running.append(process)
            return process

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            self._closed = True
        for process in self._running:
            kill(process)
        for process in self._running:
            process.wait()
        if self._previous is not None:
            # a second SIGTERM during the exit would replace the exit code
            exits = isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
            signal.signal(signal.SIGTERM, signal.SIG_IGN if exits else self._previous)


def end_with(parent: int) -> None:
    """In a process just forked: the kernel sends it SIGTERM when its parent ends. Exits if the parent has ended."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(143)


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder that is removed even if a signal handler raises: signals wait while it is created and removed.

    tempfile.TemporaryDirectory alone leaves the folder behind if a handler raises just after it was created.
    """

    def __init__(self, prefix: str = "paceline-"):
        with _deferred_signals():
            super().__init__(prefix=prefix)

    def cleanup(self) -> None:
        with _deferred_signals():
            super().cleanup()


@contextlib.contextmanager
def _deferred_signals() -> Iterator[None]:
    """Delays handled signals until the context exits; not in other threads, since handlers run in the main one."""
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
    """Kills a process that leads its session, and the processes that it started, as ssh starts some."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def piped(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes], IO[bytes]]:
    """Starts a program in its own session, out of reach of a terminal's Ctrl-C; returns it and its three pipes."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    return process, process.stdin, process.stdout, process.stderr


def received(process: subprocess.Popen[bytes], limit_s: float) -> tuple[str, str]:
    """Waits until a process ends. Returns the last MAX_BYTES of its stdout and of its stderr. Raises TimeoutError."""
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


def _raise_exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
