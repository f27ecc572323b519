"""Lock on a run's folder: two runs that start there would overwrite each other's checkpoints.

The lock belongs to one process: children do not inherit it, and the kernel releases it when the process ends. A process
that takes over from a leader which is suspended, and so still holds the lock, continues without the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from paceline.errors import CheckpointError

NAME = "lock"


def check_free(folder: Path) -> None:
    """Raises CheckpointError where another run holds the folder's lock."""
    if (handle := acquire(folder)) is not None:
        os.close(handle)


def acquire(folder: Path) -> int | None:
    """A file that holds the lock while open; None where the file system has no locks. Raises CheckpointError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(file)
        if not isinstance(error, BlockingIOError | PermissionError):  # POSIX permits either for a lock that is held
            return None
        raise CheckpointError(
            f"another run writes to {folder} ({owner}); wait for its end, end it, or give another folder: --out, "
            f"PACELINE_FOLDER, or join(folder=)"
        ) from None
    with contextlib.suppress(OSError):  # such as a full disk
        os.ftruncate(file, 0)
        os.pwrite(file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return file
