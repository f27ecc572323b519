"""Garbage collection off for a while, in a process of several threads that forks.

Among the garbage of a process may be what only it can end, such as an abandoned link: in a fork, its destructor waits
for threads that the fork does not have, or crashes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.RLock()


@contextlib.contextmanager
def collection_off() -> Iterator[bool]:
    """Gives whether collection was on. Other threads neither turn it on again meanwhile, nor fork."""
    with _lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield enabled
        finally:
            if enabled:
                gc.enable()


def _free_in_child() -> None:
    with contextlib.suppress(RuntimeError):
        while True:
            _lock.release()  # the frames that hold it never end here


# a child that another thread forked meanwhile would never turn it on
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_free_in_child)
