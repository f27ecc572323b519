"""Detached runs outlive their terminal: the launcher has its own session, its output and exit code go to files.

~/.local/state/paceline/detached/ID/     for its owner alone
    run.json    what was started, from which folder, on which host
    output      all that it prints
    lock        held as long as it runs
    pid         of the launcher
    begun       there when processes have been started
    code        its exit code, at the end
    orders      what another launcher needs to know to take its place, as long as it runs on hosts
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from paceline.launch.child_processes import end_with
from paceline.report.log import log

VARIABLE = "PACELINE_DETACHED"  # tells the launcher that it is the one
RUN = "PACELINE_RUN"  # tells its processes by which id they are asked for
KEPT = 20  # runs that have ended, and can still be looked at
POLL_S = 0.05

_mine: list[Path] = []


class Detached:
    """A run by its folder; ``id`` is the folder's name."""

    def __init__(self, folder: Path):
        self.folder, self.id = folder, folder.name

    @property
    def about(self) -> Any:
        return json.loads((self.folder / "run.json").read_text())

    @property
    def running(self) -> bool:
        # it may be forgotten now
        with contextlib.suppress(FileNotFoundError), open(self.folder / "lock", "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @property
    def begun(self) -> bool:
        return (self.folder / "begun").exists()

    @property
    def code(self) -> int | None:
        """None: it runs, or was killed together with the process that would have noted it."""
        try:
            return int((self.folder / "code").read_text())
        except (FileNotFoundError, ValueError):
            return None

    @property
    def lost(self) -> bool:
        """Whether its launcher was killed, and its nodes may train on without it."""
        return not self.running and (self.folder / "orders").exists()

    def follow(self, to: BinaryIO, until_begun: bool = False) -> int | None:
        """Passes its output on, from the beginning to its end, or until it has begun. Returns its exit code then."""
        with open(self.folder / "output", "rb") as output:
            while True:
                over = not self.running or (until_begun and self.begun)  # asked first, so that nothing is left unread
                while data := output.read(1 << 16):
                    to.write(data)
                    to.flush()
                if over:
                    return None if until_begun and self.begun and self.running else self._end()
                time.sleep(POLL_S)

    def _end(self) -> int:
        if self.code is None:
            log.error(f"{self.id} was killed, or its machine stopped: no exit code was noted")
        if self.lost:
            log.error(
                f"the launcher of {self.id} was killed, and its nodes may train on without it, on "
                f"{self.about['hosts']}: paceline attach {self.id} takes its place, with --stop they save and end"
            )
        return 1 if self.code is None else self.code

    def interrupt(self) -> None:
        """As Ctrl-C would. Raises ValueError on another machine than its own."""
        self.check_here()
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((self.folder / "pid").read_text()), signal.SIGINT)

    def wait_begun(self) -> None:
        while self.running and not self.begun:
            time.sleep(POLL_S)

    def check_here(self) -> None:
        if (host := self.about["host"]) != socket.gethostname():
            raise ValueError(f"{self.id} was started on {host}: paceline attach {self.id} belongs there")


def home() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "paceline" / "detached"


def everyone() -> list[Detached]:
    """The oldest first: ids have no year."""
    found = []
    for path in home().glob("*/run.json"):
        with contextlib.suppress(FileNotFoundError):  # forgotten meanwhile
            found.append((path.stat().st_mtime_ns, path.parent))
    return [Detached(folder) for _, folder in sorted(found)]


def find(name: str) -> Detached:
    """By its id, or by how only one begins. Raises ValueError."""
    runs = everyone()
    fits = [run for run in runs if run.id == name] or [run for run in runs if run.id.startswith(name)]
    if len(fits) != 1:
        known = ", ".join(run.id for run in fits or runs) or "none"
        what = "several runs begin with" if fits else "there is no detached run"
        raise ValueError(f"{what} {name!r}; accepted: {known}; `paceline attach` lists them")
    return fits[0]


def leave(words: Sequence[str], hosts: str | None = None) -> Detached | None:
    """Starts this very command once more, detached, and returns that; None in the one that was started so. ``hosts``:
    where its nodes run, if elsewhere."""
    if chosen():
        return None
    _forget()
    folder = home() / f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True, mode=0o700)
    try:
        output, lock = _lay(folder, words, hosts)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _fork(folder, output, lock)
    return Detached(folder)


def replace(run: Detached) -> None:
    """Starts this very command once more, detached, as the launcher of a run that lost its own. Raises ValueError on
    another machine than its own."""
    run.check_here()
    lock = os.open(run.folder / "lock", os.O_WRONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        output = os.open(run.folder / "output", os.O_WRONLY | os.O_APPEND)
    except BlockingIOError:  # another process has just done it
        os.close(lock)
        return
    for name in ("code", "begun", "pid"):
        (run.folder / name).unlink(missing_ok=True)
    _fork(run.folder, output, lock)


def chosen() -> bool:
    """Whether this process was started as the launcher of a detached run."""
    if mine := os.environ.pop(VARIABLE, None):
        _mine.append(Path(mine))
        os.environ[RUN] = Path(mine).name
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
    return bool(mine)


def _lay(folder: Path, words: Sequence[str], hosts: str | None) -> tuple[int, int]:
    """The files of a run, open: its output and its lock, which is held. run.json comes last, and whole."""
    about = {"command": list(words), "folder": os.getcwd(), "host": socket.gethostname(), "hosts": hosts}
    about["date"] = time.strftime("%F %T")
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # each process that has a copy of this descriptor holds it
    _write(folder / "run.json", json.dumps(about))
    return output, lock


def begun() -> None:
    """Called by a launcher when all is checked and the processes start: its terminal is not needed any more."""
    for folder in _mine:
        (folder / "begun").touch()


def keep_orders(orders: str) -> None:
    """For another launcher, should this one be killed."""
    for folder in _mine:
        _write(folder / "orders", orders)


def forget_orders() -> None:
    """Called when the run has ended."""
    for folder in _mine:
        (folder / "orders").unlink(missing_ok=True)


def left() -> bool:
    """Whether this launcher is detached: what it starts elsewhere then outlives it."""
    return bool(_mine)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and for its owner alone: a secret may be in it."""
    part = path.with_name(f"{path.name}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)


def _fork(folder: Path, output: int, lock: int) -> None:
    """Forks a process that only waits for the launcher, its child, and notes its end; closes the files here."""
    sys.stdout.flush()
    if os.fork():
        os.close(output)
        os.close(lock)
        return
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        for source, number in ((nowhere, 0), (output, 1), (output, 2)):
            os.dup2(source, number)
        os.set_inheritable(lock, True)
        keeper, launcher = os.getpid(), os.fork()
        if not launcher:
            end_with(keeper)
            os.environ[VARIABLE] = str(folder)
            os.environ.setdefault("PYTHONUNBUFFERED", "1")  # followers read what was printed just now
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(launcher, number))
        (folder / "pid").write_text(str(launcher))
        code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
        code = code if code >= 0 else 128 - code
    finally:
        with contextlib.suppress(OSError):  # a full disk: it must not go on as the command that it was forked from
            _write(folder / "code", str(code))
        os._exit(0)


def _forget() -> None:
    """All but the last that have ended."""
    for run in [run for run in everyone() if not run.running and not run.lost][:-KEPT]:
        shutil.rmtree(run.folder, ignore_errors=True)
