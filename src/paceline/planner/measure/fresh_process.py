"""Runs a command in a fresh process with a deadline, keeps its last error line, and ends all its child processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import psutil

from paceline.launch.child_processes import end_with

GRACE_S = 3.0
WARNING = re.compile(r"\S.*:\d+: \w*Warning: |\[W\d")  # of Python, of torch's C++
RANK = re.compile(r"^\[rank\d+\]: ?")  # torch's, before each line of an error
OURS = "paceline: "
KILLED = 137, -signal.SIGKILL  # exit codes after SIGKILL: of a child of the command, and its own


@dataclass(frozen=True)
class ProcessResult:
    """``code``: the exit code; None if the deadline passed. ``last_line``: the last line on stderr that says why.
    ``found``: what follows the wanted words there."""

    code: int | None
    last_line: str
    found: str = ""


def run_in_process(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float, wanted: str | None = None
) -> ProcessResult:
    """Discards stdout and keeps the last line of stderr, and what follows ``wanted`` there. The process also ends when
    this one is interrupted."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509 - one system call, safe beside threads
        )
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    last_line = why(lines)[:300] or f"exit code {code}"
    found = next((line.partition(wanted)[2] for line in lines if wanted and wanted in line), "")
    return ProcessResult(code, f"{last_line}: killed, as where memory runs out" if code in KILLED else last_line, found)


def why(lines: Sequence[str]) -> str:
    """The line that says why a process ended: its last error, else its last line that is no warning; "" if none does.
    A warning has the line of its source below it, and after an error torch's own threads may have more to say."""
    said, raised, traced, warned = "", "", False, False
    for line in (RANK.sub("", each).rstrip() for each in lines):
        if not line or (warned and line[0].isspace()):
            continue
        warned = bool(WARNING.match(line))
        if line.startswith("Traceback (most recent call last)"):
            traced = True
        elif not warned and not line[0].isspace():
            said = line
            raised = line if traced or (raised and line.startswith(OURS)) else raised
            traced = False
    return raised or said


def _end(child: subprocess.Popen[bytes]) -> None:
    """Sends SIGTERM first, so that the process can end its children; then kills it and the remaining children."""
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
