"""A folder or a file appears whole, or not at all.

Everything is written under a name ending in ``.part`` beside its place, brought to the disk, and renamed. A
folder that replaces another is preceded by renaming that one to ``.old``, because no rename replaces a
full folder; so at every moment one of the two has a name that readers look for.
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
# what file systems answer that cannot lock or sync a folder: there one writer per run has to keep to itself
UNKNOWN_TO_SOME = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def folder(path: Path, fill: Callable[[Path], object]) -> None:
    """``fill`` writes the files, each synced, into the folder it is given; then the folder is at ``path``."""
    aside = part(path)
    try:
        aside.mkdir()
        fill(aside)
        sync(aside)
        if path.exists():
            path.replace(old(path))
        aside.replace(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync(path.parent)
    if old(path).exists():
        remove(old(path))


def file(path: Path, write: Callable[[Path], object]) -> None:
    """``write`` writes the file, synced, at the path it is given; then it is at ``path``."""
    aside = part(path)
    try:
        write(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove(path: Path) -> None:
    """A folder is gone at once; what cannot be deleted stays as ``.part`` for `mend` to try again."""
    aside = part(path)
    path.replace(aside)
    shutil.rmtree(aside, ignore_errors=True)


def mend(run: Path, pattern: str) -> None:
    """Removes what killed writers left, and finishes what they began. Only inside `alone`."""
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
    """The names in the folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNKNOWN_TO_SOME:
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def alone(run: Path) -> Iterator[None]:
    """Other writers of the folder wait; the system frees the lock of a dead one. Raises TimeoutError."""
    handle = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + WAIT_S
        while not _lock(handle):
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, f"another process has been writing there for {WAIT_S:.0f} s")
            time.sleep(0.02)
        yield
    finally:
        # not by closing alone: a process forked in between would hold the lock on
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNKNOWN_TO_SOME:
            raise
    return True
