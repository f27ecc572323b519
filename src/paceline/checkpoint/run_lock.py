"""Lock on a run's folder: two runs that start there would overwrite each other's checkpoints.

The lock is its process's own: children do not inherit it, and the kernel drops it with the process, however that ends.
Who takes over a run from a lost leader goes on without it, where that one is only stopped, and holds it still.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from paceline.errors import CheckpointError

NAME = "lock"


def free(folder: Path) -> None:
    """Raises CheckpointError where another process's run writes there."""
    if (held := claim(folder)) is not None:
        os.close(held)


def claim(folder: Path) -> int | None:
    """A file that holds the lock while it is open; None where the file system has no locks. Raises CheckpointError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        who = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(file)
        if not isinstance(error, BlockingIOError | PermissionError):  # POSIX knows both, for a lock that is held
            return None
        raise CheckpointError(
            f"another run writes to {folder} ({who}); wait for its end, end it, or give another folder: --out, "
            f"PACELINE_FOLDER, or join(folder=)"
        ) from None
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(file, 0)
        os.pwrite(file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return file
