"""Watch over idle connections, one to each other process: the kernel closes it when that process ends.

The kernel hangs up in peace for a process that has ended, however it did. That a connection is refused shows less: a
firewall refuses, too, for one that is alive. It may even break a line; hang up in peace it cannot.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from weakref import ReferenceType, finalize, ref

from paceline.errors import LinkError
from paceline.link.net.store_client import StoreClient

HANG_UP_S = 1.0  # after it was seen that nobody listens there any more: files are closed one after the other
FIRST_S, AGAIN_S = 1.5, 5.0  # for all lines at first; before those that are missing, or have broken, are tried again


class ConnectionFailureDetector:
    """Lines by the names of those to whom they lead, opened by ``reach``, and again where they break.

    Without one nobody is known to have ended.
    """

    def __init__(self, reach: Callable[[str], StoreClient]):
        self._reach = reach
        self._names: list[str] = []
        self._lines: dict[str, StoreClient] = {}
        self._lock, self._closing, self._tried = threading.Lock(), threading.Event(), threading.Event()
        finalize(self, _close, self._lines, self._lock, self._closing)

    def watch(self, names: Iterable[str], other: ConnectionFailureDetector | None = None) -> None:
        """These and no others, once; lines of ``other`` to any of them are taken over from it, which ends."""
        self._names = list(names)
        if other:
            other._closing.set()
            with other._lock:
                self._lines.update({name: line for name, line in other._lines.items() if name in self._names})
                for name in other._lines.keys() - self._lines.keys():
                    other._lines[name].close()
                other._lines.clear()
        if not self._missing():
            self._tried.set()
        tend = threading.Thread(target=_tend, args=(ref(self), self._closing), name="paceline watch", daemon=True)
        tend.start()
        self._tried.wait(FIRST_S)

    def _missing(self) -> list[str]:
        return [name for name in self._names if name not in self._lines or self._lines[name].broken]

    def _open_missing(self) -> None:
        for name in self._missing():
            with contextlib.suppress(LinkError):
                line = self._reach(name)
                line.keep()
                with self._lock:
                    if self._closing.is_set():
                        line.close()
                    else:
                        self._lines[name] = line
        self._tried.set()

    def ended(self, name: str, limit_s: float = 0.0) -> bool:
        line = self._lines.get(name)
        return line is not None and line.ended(limit_s)


def _tend(watch: ReferenceType[ConnectionFailureDetector], closing: threading.Event) -> None:
    while not closing.is_set() and (mine := watch()):
        mine._open_missing()
        del mine
        closing.wait(AGAIN_S)


def _close(lines: dict[str, StoreClient], lock: threading.Lock, closing: threading.Event) -> None:
    closing.set()
    with lock:
        for line in lines.values():
            line.close()
