"""Atomic write: a folder or a file appears completely, or not at all.

Everything is written beside its destination under a name that ends in ``.part``, synced to the disk, and renamed. No
rename replaces a folder that has files; so an existing folder is first renamed to ``.old``. At every moment one of the
two has a name that readers accept.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WAIT_S = 60.0
# errors of file systems that cannot lock or sync a folder: there the user must run a single writer per run
UNSUPPORTED = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def folder(path: Path, fill: Callable[[Path], object]) -> None:
    """``fill`` writes and syncs the files in a temporary folder, which is then renamed to ``path``."""
    temporary = part(path)
    try:
        temporary.mkdir()
        fill(temporary)
        sync(temporary)
        if path.exists():
            path.replace(old(path))
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)
    if old(path).exists():
        remove(old(path))


def file(path: Path, write: Callable[[Path], object]) -> None:
    """``write`` writes and syncs a temporary file, which is then renamed to ``path``."""
    temporary = part(path)
    try:
        write(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove(path: Path) -> None:
    """Removes a folder in one step, by renaming it. Files that cannot be deleted stay in ``.part`` for `recover`."""
    temporary = part(path)
    path.replace(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def recover(run: Path, pattern: str) -> None:
    """Deletes partial folders of killed writers and completes interrupted renames. Call it inside `locked`."""
    for path in run.glob(pattern + ".old"):
        if path.with_suffix("").exists():
            remove(path)
        else:
            path.replace(path.with_suffix(""))
    for path in run.glob(pattern + ".part"):
        shutil.rmtree(path, ignore_errors=True)


def part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def sync(folder: Path) -> None:
    """Syncs the folder's directory entries to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Holds the folder's lock; other writers wait. The kernel releases a dead process's lock. Raises TimeoutError."""
    handle = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + WAIT_S
        while not _lock(handle):
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, f"another process has held the folder's lock for {WAIT_S:.0f} s")
            time.sleep(0.02)
        yield
    finally:
        # unlock explicitly: closing alone leaves the lock with any process that was forked meanwhile
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    return True
