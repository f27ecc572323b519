"""A command in fresh processes, with an end: a deadline, its last words, and nothing left of it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

GRACE_S = 3.0
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ProcessResult:
    """``code`` is None where the deadline came first."""

    code: int | None
    last_words: str


def run_in_process(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> ProcessResult:
    """What it prints is swallowed; the last line of its errors is kept. Ctrl-C here ends it, too."""
    parent = os.getpid()

    def die_with_parent() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(143)

    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, safe beside threads
        )
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    return ProcessResult(code, lines[-1][:300] if lines else f"exit code {code}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Asked first, so that it can end its own; then killed, with whatever it has left."""
    if child.poll() is not None:
        return
    try:
        family = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    child.terminate()
    psutil.wait_procs(family, GRACE_S)
    for process in family:
        if process.is_running():
            process.kill()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
