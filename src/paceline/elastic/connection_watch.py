"""Watch over idle connections, one to each other process: the kernel closes it when that process ends.

The kernel closes the connection with FIN when a process has ended, for whatever reason. A refused connection proves
nothing: a firewall may refuse it, and may also reset an open one, but it cannot close a connection with FIN.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from weakref import ReferenceType, finalize, ref

from paceline.errors import LinkError
from paceline.link.net.store_client import StoreClient

HANG_UP_S = 1.0  # after a refused connection: a process that ends closes its files one after the other
FIRST_S, RETRY_S = 1.5, 5.0  # for the first attempts; before missing or broken connections are tried again


class ConnectionWatch:
    """Connections by the names of the processes at the other end, opened by ``connect``, and again where they break.

    Without a connection to it, no process is known to have ended.
    """

    def __init__(self, connect: Callable[[str], StoreClient]):
        self._connect = connect
        self._names: list[str] = []
        self._connections: dict[str, StoreClient] = {}
        self._lock, self._closing, self._tried = threading.Lock(), threading.Event(), threading.Event()
        finalize(self, _close, self._connections, self._lock, self._closing)

    def watch(self, names: Iterable[str], previous: ConnectionWatch | None = None) -> None:
        """Watches these processes; called once. Connections to them are taken over from ``previous``, which ends."""
        self._names = list(names)
        if previous:
            previous._closing.set()
            with previous._lock:
                self._connections.update({name: c for name, c in previous._connections.items() if name in self._names})
                for name in previous._connections.keys() - self._connections.keys():
                    previous._connections[name].close()
                previous._connections.clear()
        if not self._missing():
            self._tried.set()
        opens = threading.Thread(target=_keep_open, args=(ref(self), self._closing), name="paceline watch", daemon=True)
        opens.start()
        self._tried.wait(FIRST_S)

    def _missing(self) -> list[str]:
        return [name for name in self._names if name not in self._connections or self._connections[name].broken]

    def _open_missing(self) -> None:
        for name in self._missing():
            with contextlib.suppress(LinkError):
                connection = self._connect(name)
                connection.keep()
                with self._lock:
                    if self._closing.is_set():
                        connection.close()
                    else:
                        self._connections[name] = connection
        self._tried.set()

    def ended(self, name: str, limit_s: float = 0.0) -> bool:
        connection = self._connections.get(name)
        return connection is not None and connection.ended(limit_s)


def _keep_open(reference: ReferenceType[ConnectionWatch], closing: threading.Event) -> None:
    while not closing.is_set() and (watch := reference()):
        watch._open_missing()
        del watch
        closing.wait(RETRY_S)


def _close(connections: dict[str, StoreClient], lock: threading.Lock, closing: threading.Event) -> None:
    closing.set()
    with lock:
        for connection in connections.values():
            connection.close()
