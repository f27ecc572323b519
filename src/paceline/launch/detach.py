"""Detached runs outlive their terminal: the launcher has its own session, and writes output and exit code to files.

~/.local/state/paceline/detached/ID/     readable by its owner alone
    run.json    command, folder and host of the run
    output      all that the launcher prints
    lock        held while the launcher runs
    pid         the launcher's process id
    begun       exists once processes have been started
    code        the launcher's exit code, at the end
    orders      state that another launcher needs to replace this one; exists while the run trains on hosts
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

VARIABLE = "PACELINE_DETACHED"  # in the launcher's environment: the folder of its run
RUN = "PACELINE_RUN"  # in its processes' environment: the id by which `paceline doctor --run` finds them
MAX_ENDED = 20  # ended runs whose folders are kept
POLL_S = 0.05

_own_folders: list[Path] = []


class Detached:
    """A detached run, read from its folder; ``id`` is the folder's name."""

    def __init__(self, folder: Path):
        self.folder, self.id = folder, folder.name

    @property
    def about(self) -> Any:
        return json.loads((self.folder / "run.json").read_text())

    @property
    def running(self) -> bool:
        # another process may remove the folder now
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
        """The exit code; None: the launcher runs, or was killed together with the process that notes its exit code."""
        try:
            return int((self.folder / "code").read_text())
        except (FileNotFoundError, ValueError):
            return None

    @property
    def launcher_killed(self) -> bool:
        """Whether the launcher was killed, and its nodes may continue to train."""
        return not self.running and (self.folder / "orders").exists()

    def follow(self, to: BinaryIO, until_begun: bool = False) -> int | None:
        """Copies the run's output from its beginning. Returns the exit code at its end, or None once it has begun."""
        with open(self.folder / "output", "rb") as output:
            while True:
                over = not self.running or (until_begun and self.begun)  # before the read, so that no output is missed
                while data := output.read(1 << 16):
                    to.write(data)
                    to.flush()
                if over:
                    return None if until_begun and self.begun and self.running else self._end()
                time.sleep(POLL_S)

    def _end(self) -> int:
        if self.code is None:
            log.error(f"{self.id} was killed, or its machine stopped: no exit code was noted")
        if self.launcher_killed:
            log.error(
                f"the launcher of {self.id} was killed, and its nodes may continue to train on {self.about['hosts']}: "
                f"paceline attach {self.id} replaces the launcher; with --stop the nodes save and end"
            )
        return 1 if self.code is None else self.code

    def interrupt(self) -> None:
        """Sends the launcher SIGINT, as Ctrl-C does. Raises ValueError on another machine than the run's."""
        self.check_here()
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((self.folder / "pid").read_text()), signal.SIGINT)

    def wait_begun(self) -> None:
        while self.running and not self.begun:
            time.sleep(POLL_S)

    def check_here(self) -> None:
        if (host := self.about["host"]) != socket.gethostname():
            raise ValueError(f"{self.id} was started on {host}: run paceline attach {self.id} there")


def home() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "paceline" / "detached"


def all_runs() -> list[Detached]:
    """All detached runs of this user, the oldest first; by file time, since ids have no year."""
    runs = []
    for path in home().glob("*/run.json"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            runs.append((path.stat().st_mtime_ns, path.parent))
    return [Detached(folder) for _, folder in sorted(runs)]


def find(name: str) -> Detached:
    """The run with this id, or the only one whose id begins with ``name``. Raises ValueError."""
    runs = all_runs()
    fits = [run for run in runs if run.id == name] or [run for run in runs if run.id.startswith(name)]
    if len(fits) != 1:
        known = ", ".join(run.id for run in fits or runs) or "none"
        what = "several runs begin with" if fits else "there is no detached run"
        raise ValueError(f"{what} {name!r}; accepted: {known}; `paceline attach` lists them")
    return fits[0]


def start_detached(command: Sequence[str], hosts: str | None = None) -> Detached | None:
    """Starts this command again, detached, and returns the run; returns None in that detached process. ``hosts``: the
    hosts of the run's nodes, if not this machine."""
    if assume_launcher_role():
        return None
    _remove_old()
    folder = home() / f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True, mode=0o700)
    try:
        output, lock = _create_files(folder, command, hosts)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _fork(folder, output, lock)
    return Detached(folder)


def replace(run: Detached) -> None:
    """Starts this command again, detached, as the launcher of a run whose launcher was killed. Raises ValueError on
    another machine than the run's."""
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


def assume_launcher_role() -> bool:
    """Whether this process was started as the launcher of a detached run; if so, notes its folder."""
    if folder := os.environ.pop(VARIABLE, None):
        _own_folders.append(Path(folder))
        os.environ[RUN] = Path(folder).name
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores SIGINT
    return bool(folder)


def _create_files(folder: Path, command: Sequence[str], hosts: str | None) -> tuple[int, int]:
    """Creates a run's files and returns two open ones: output and the locked lock. Writes run.json last, atomically."""
    about = {"command": list(command), "folder": os.getcwd(), "host": socket.gethostname(), "hosts": hosts}
    about["date"] = time.strftime("%F %T")
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # held by every process that inherits this descriptor
    _write(folder / "run.json", json.dumps(about))
    return output, lock


def mark_begun() -> None:
    """Called by a launcher after all checks, when the processes start: the user's terminal is no longer needed."""
    for folder in _own_folders:
        (folder / "begun").touch()


def save_orders(orders: str) -> None:
    """Saves the orders, from which another launcher can replace this one if it is killed."""
    for folder in _own_folders:
        _write(folder / "orders", orders)


def remove_orders() -> None:
    """Removes the saved orders; called when the run has ended."""
    for folder in _own_folders:
        (folder / "orders").unlink(missing_ok=True)


def is_detached() -> bool:
    """Whether this launcher is detached; nodes that a detached launcher starts on hosts outlive it."""
    return bool(_own_folders)


def _write(path: Path, text: str) -> None:
    """Writes a file atomically, readable by its owner alone, since it may contain a secret."""
    part = path.with_name(f"{path.name}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)


def _fork(folder: Path, output: int, lock: int) -> None:
    """Forks a process that starts the launcher and notes its exit code; closes the two descriptors in this process."""
    sys.stdout.flush()
    if os.fork():
        os.close(output)
        os.close(lock)
        return
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        devnull = os.open(os.devnull, os.O_RDONLY)
        for source, number in ((devnull, 0), (output, 1), (output, 2)):
            os.dup2(source, number)
        os.set_inheritable(lock, True)
        parent, launcher = os.getpid(), os.fork()
        if not launcher:
            end_with(parent)
            os.environ[VARIABLE] = str(folder)
            os.environ.setdefault("PYTHONUNBUFFERED", "1")  # `follow` reads output as soon as it is printed
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(launcher, number))
        (folder / "pid").write_text(str(launcher))
        code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
        code = code if code >= 0 else 128 - code
    finally:
        with contextlib.suppress(OSError):  # on a full disk, too, this fork must exit here
            _write(folder / "code", str(code))
        os._exit(0)


def _remove_old() -> None:
    """Removes the folders of ended runs, except the last MAX_ENDED."""
    for run in [run for run in all_runs() if not run.running and not run.launcher_killed][:-MAX_ENDED]:
        shutil.rmtree(run.folder, ignore_errors=True)
