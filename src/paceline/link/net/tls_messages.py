"""Numbered messages over one-way TLS connections: each is delivered where a receiver waits for it.

    head    kind, number, part, bytes of what follows

A peer's messages leave in the order in which they were sent. What comes before anybody waits for it is kept. After a
line has broken, whatever needs it fails, and nothing else does.
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
Leaving = queue.SimpleQueue[tuple[bytes, memoryview, "Work"]]

HEAD = struct.Struct("<cqIQ")
SMALL_BYTES = 16 * 1024 - HEAD.size  # with their head one record of TLS


class Work:
    """So many things to be done, and then ``then``; what goes wrong goes wrong with ``whole``, too.

    Waited for as for gloo's: RuntimeError where it has not ended in time, or not well.
    """

    def __init__(self, count: int, then: Callable[[], None] | None = None, whole: Work | None = None):
        self._left, self._then, self._whole = count, then, whole
        self._error = ""
        self._lock, self._ended = threading.Lock(), threading.Event()
        if not count:
            self._finish()

    def did(self) -> None:
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
    """``out`` and ``into``: the lines to each peer, and from it. ``names``: of peers, for what is told of a loss."""

    def __init__(self, out: Mapping[int, socket.socket], into: Mapping[int, socket.socket], names: Mapping[int, str]):
        self.names = names
        self._lock = threading.Lock()
        self._wanted: defaultdict[tuple[int, Key], deque[tuple[memoryview, Work]]] = defaultdict(deque)
        self._early: defaultdict[tuple[int, Key], deque[bytearray]] = defaultdict(deque)
        self._broken: dict[int, str] = {}
        self._leaving: dict[int, Leaving] = {}
        for peer, line in out.items():
            self._leaving[peer] = queue.SimpleQueue()
            self._begin(f"to {peer}", self._write, peer, line)
        for peer, line in into.items():
            self._begin(f"from {peer}", self._read, peer, line)

    def _begin(self, name: str, work: Callable[[int, socket.socket], None], peer: int, line: socket.socket) -> None:
        threading.Thread(target=work, args=(peer, line), name=f"paceline mail {name}", daemon=True).start()

    def send(self, peer: int, key: Key, words: memoryview, work: Work) -> None:
        """``words`` may not change until it is done."""
        with self._lock:
            broken = self._broken.get(peer)
            if not broken:
                self._leaving[peer].put((HEAD.pack(*key, len(words)), words, work))
        if broken:
            work.fail(broken)

    def receive(self, peer: int, key: Key, into: memoryview, work: Work) -> None:
        with self._lock:
            early = self._pop(self._early, peer, key)
            broken = self._broken.get(peer) if early is None else None
            if early is None and not broken:
                self._wanted[peer, key].append((into, work))
        if early is not None:
            self._land(peer, early, into, work)
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

    def _land(self, peer: int, words: bytearray, into: memoryview, work: Work) -> None:
        if len(words) != len(into):
            work.fail(_unlike(self.names[peer], len(words), len(into)))
            return
        into[:] = words
        work.did()

    def _write(self, peer: int, line: socket.socket) -> None:
        leaving = self._leaving[peer]
        with line:
            self._write_all(peer, line, leaving)
        while not leaving.empty():
            leaving.get()[2].fail(self._broken.get(peer, "this link was closed"))

    def _write_all(self, peer: int, line: socket.socket, leaving: Leaving) -> None:
        while True:
            head, words, work = leaving.get()
            if not head:
                return
            try:
                if len(words) <= SMALL_BYTES:
                    line.sendall(b"".join((head, words)))
                else:
                    line.sendall(head)
                    line.sendall(words)
            except (OSError, ValueError) as error:
                self._break(peer, error)
                work.fail(self._broken[peer])
                return
            work.did()
            del words, work  # nothing is kept in memory while there is nothing to send

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
                wanted = self._pop(self._wanted, peer, key)  # since then
                if wanted is None:
                    self._early[peer, key].append(early)
            if wanted is not None:
                self._land(peer, early, *wanted)
            return
        into, work = wanted
        try:
            if size != len(into):
                raise ConnectionError(_unlike(self.names[peer], size, len(into)))
            _fill(line, into)
        except OSError as error:
            work.fail(self._told(peer, error))
            raise
        work.did()

    def close(self) -> None:
        """Lets the writers end, once what was sent has left. Lines are closed by whoever opened them."""
        for leaving in self._leaving.values():
            leaving.put((b"", memoryview(b""), Work(1)))

    def _told(self, peer: int, error: Exception) -> str:
        return f"[{self.names[peer]}] {error}"

    def _break(self, peer: int, error: Exception) -> None:
        with self._lock:
            self._broken.setdefault(peer, self._told(peer, error))
            keys = [place for place in self._wanted if place[0] == peer]
            lost = [work for place in keys for _, work in self._wanted.pop(place)]
        for work in lost:
            work.fail(self._broken[peer])


def _fill(line: socket.socket, view: memoryview) -> None:
    while len(view):
        count = line.recv_into(view)
        if not count:
            raise ConnectionResetError("it hung up")
        view = view[count:]


def _unlike(name: str, sent: int, expected: int) -> str:
    return f"{name} sent {sent} bytes where {expected} were expected: the ranks do not do the same"
