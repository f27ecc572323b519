"""Garbage collection in a process of several threads that forks.

Among the garbage of a process may be what only it can end, such as an abandoned link: in a fork, its destructor waits
for threads that the fork does not have, or crashes. So a fork begins without collection, and what there was before it
is never collected there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.RLock()  # of who turns collection off for a moment: it is held by none for long
_enabled = [True]  # whether collection was on before a fork


@contextlib.contextmanager
def collection_off() -> Iterator[None]:
    """Meanwhile other threads neither turn it on again, nor fork: the fork would never turn it on."""
    with _lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


def _before_fork() -> None:
    _lock.acquire()
    _enabled[0] = gc.isenabled()
    gc.disable()


def _after_in_parent() -> None:
    if _enabled[0]:
        gc.enable()
    _lock.release()


def _after_in_child() -> None:
    gc.freeze()
    _after_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
