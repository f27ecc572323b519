"""Numbered messages over one-way TLS connections: each is copied into the buffer that a receiver has posted for it.

    head    kind, number, part, bytes of what follows

Messages to a peer leave in the order of the sends. A message that arrives before its receive is posted is kept. When a
connection breaks, the operations that need it fail; all others continue.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

Key = tuple[bytes, int, int]  # a kind, a number, a part
Outgoing = queue.SimpleQueue[tuple[bytes, memoryview, "Work"]]

HEAD = struct.Struct("<cqIQ")
SMALL_BYTES = 16 * 1024 - HEAD.size  # with the head, one TLS record


class Work:
    """An operation of ``count`` parts; after the last, ``then`` is called. An error fails ``whole``, too.

    `wait` is as that of gloo's works: RuntimeError where the operation has not ended in time, or has failed.
    """

    def __init__(self, count: int, then: Callable[[], None] | None = None, whole: Work | None = None):
        self._left, self._then, self._whole = count, then, whole
        self._error = ""
        self._lock, self._ended = threading.Lock(), threading.Event()
        if not count:
            self._finish()

    def part_done(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._finish()

    def _finish(self) -> None:
        try:
            if self._then and not self._ended.is_set():
                self._then()
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
        self._ended.set()

    def fail(self, why: str) -> None:
        with self._lock:
            self._error = self._error or why
        self._ended.set()
        if self._whole:
            self._whole.fail(why)

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self._ended.wait(timeout.total_seconds()):
            raise RuntimeError("not yet")
        if self._error:
            raise RuntimeError(self._error)


class Mail:
    """``out`` and ``into``: the connections to each peer, and from it. ``names``: of peers, for error texts."""

    def __init__(self, out: Mapping[int, socket.socket], into: Mapping[int, socket.socket], names: Mapping[int, str]):
        self.names = names
        self._lock = threading.Lock()
        self._wanted: defaultdict[tuple[int, Key], deque[tuple[memoryview, Work]]] = defaultdict(deque)
        self._early: defaultdict[tuple[int, Key], deque[bytearray]] = defaultdict(deque)
        self._broken: dict[int, str] = {}
        self._outgoing: dict[int, Outgoing] = {}
        for peer, line in out.items():
            self._outgoing[peer] = queue.SimpleQueue()
            self._begin(f"to {peer}", self._write, peer, line)
        for peer, line in into.items():
            self._begin(f"from {peer}", self._read, peer, line)

    def _begin(self, name: str, work: Callable[[int, socket.socket], None], peer: int, line: socket.socket) -> None:
        threading.Thread(target=work, args=(peer, line), name=f"paceline mail {name}", daemon=True).start()

    def send(self, peer: int, key: Key, message: memoryview, work: Work) -> None:
        """``message`` may not change until the work is done."""
        with self._lock:
            broken = self._broken.get(peer)
            if not broken:
                self._outgoing[peer].put((HEAD.pack(*key, len(message)), message, work))
        if broken:
            work.fail(broken)

    def receive(self, peer: int, key: Key, into: memoryview, work: Work) -> None:
        with self._lock:
            early = self._pop(self._early, peer, key)
            broken = self._broken.get(peer) if early is None else None
            if early is None and not broken:
                self._wanted[peer, key].append((into, work))
        if early is not None:
            self._deliver(peer, early, into, work)
        elif broken:
            work.fail(broken)

    @staticmethod
    def _pop(table: defaultdict[tuple[int, Key], deque[Any]], peer: int, key: Key) -> Any:
        if (peer, key) not in table:
            return None
        found = table[peer, key].popleft()
        if not table[peer, key]:
            del table[peer, key]
        return found

    def _deliver(self, peer: int, message: bytearray, into: memoryview, work: Work) -> None:
        if len(message) != len(into):
            work.fail(_mismatch(self.names[peer], len(message), len(into)))
            return
        into[:] = message
        work.part_done()

    def _write(self, peer: int, line: socket.socket) -> None:
        outgoing = self._outgoing[peer]
        with line:
            self._write_all(peer, line, outgoing)
        while not outgoing.empty():
            outgoing.get()[2].fail(self._broken.get(peer, "this link was closed"))

    def _write_all(self, peer: int, line: socket.socket, outgoing: Outgoing) -> None:
        while True:
            head, message, work = outgoing.get()
            if not head:
                return
            try:
                if len(message) <= SMALL_BYTES:
                    line.sendall(b"".join((head, message)))
                else:
                    line.sendall(head)
                    line.sendall(message)
            except (OSError, ValueError) as error:
                self._break(peer, error)
                work.fail(self._broken[peer])
                return
            work.part_done()
            del message, work  # releases the sent buffer while this thread waits for the next

    def _read(self, peer: int, line: socket.socket) -> None:
        head = bytearray(HEAD.size)
        try:
            while True:
                _fill(line, memoryview(head))
                kind, number, part, size = HEAD.unpack(head)
                self._take(peer, line, (kind, number, part), size)
        except (OSError, ValueError, MemoryError) as error:
            self._break(peer, error)
        finally:
            line.close()

    def _take(self, peer: int, line: socket.socket, key: Key, size: int) -> None:
        with self._lock:
            wanted = self._pop(self._wanted, peer, key)
        if wanted is None:
            early = bytearray(size)
            _fill(line, memoryview(early))
            with self._lock:
                wanted = self._pop(self._wanted, peer, key)  # posted in the meantime
                if wanted is None:
                    self._early[peer, key].append(early)
            if wanted is not None:
                self._deliver(peer, early, *wanted)
            return
        into, work = wanted
        try:
            if size != len(into):
                raise ConnectionError(_mismatch(self.names[peer], size, len(into)))
            _fill(line, into)
        except OSError as error:
            work.fail(self._text(peer, error))
            raise
        work.part_done()

    def close(self) -> None:
        """Ends the writer threads after all queued messages. The mesh, which opened the connections, closes them."""
        for outgoing in self._outgoing.values():
            outgoing.put((b"", memoryview(b""), Work(1)))

    def _text(self, peer: int, error: Exception) -> str:
        return f"[{self.names[peer]}] {error}"

    def _break(self, peer: int, error: Exception) -> None:
        with self._lock:
            self._broken.setdefault(peer, self._text(peer, error))
            keys = [place for place in self._wanted if place[0] == peer]
            failed = [work for place in keys for _, work in self._wanted.pop(place)]
        for work in failed:
            work.fail(self._broken[peer])


def _fill(line: socket.socket, view: memoryview) -> None:
    while len(view):
        count = line.recv_into(view)
        if not count:
            raise ConnectionResetError("it closed the connection")
        view = view[count:]


def _mismatch(name: str, sent: int, expected: int) -> str:
    return f"{name} sent {sent} bytes where {expected} were expected: the ranks run different operations"
