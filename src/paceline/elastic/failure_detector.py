"""Failure detector: heartbeats between rank 0 and all ranks, one per second, which carry each rank's activity.

A dense exchange may take minutes, so silence in an operation proves nothing. A closed socket does (the process died).
So does a peer without a heartbeat: after LIMIT_S if its machine does not acknowledge what it is sent (the machine or
its cable failed), after the limit for a late step if it does (the process is stalled). Rank 0 reports it to the others.
What happens then: `fault_tolerant`.

    rank -> 0:  'h' alive: its activity   'q' closes normally   '?' asks for a rank's stack   'a' a stack
    0 -> rank:  'h' alive: activity of all ranks   'q', '?', 'a' likewise   'x' a rank has failed: how
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

from paceline.errors import LinkError
from paceline.link.net.auth import CLIENT, SERVER, SIZE, MessageAuthenticator, mac, same
from paceline.link.net.framing import MAX_BYTES, MessageSocket
from paceline.report import activity
from paceline.report.activity import MIN_S, Activity
from paceline.transport import boottime_s

BEAT_S = 1.0
POLL_S = 0.1  # how soon the end of this process is noticed
LIMIT_S = MIN_S
STILL_S = 3.0  # in which this process did not run, or a peer sent nothing: the others may have continued without it
GRACE_S, NONE_MISSING_S = 2.0, 7.0  # more, before a wait is logged: if ranks are missing, and if none is
ANSWER_S = 2.5
JOIN_S = 60.0
WAIT_S = 0.5
NONCE = 16  # bytes
BEAT = b"beat"  # distinguishes its MACs from those of a joining node at the rendezvous
MAX_STRANGERS = 64
RANK = struct.Struct("<H")
SILENT = "has been silent for {:.0f} s"
STALLED = "is stalled: its machine answers, its process has not for {:.0f} s (stopped, swapped out, or starved)"


class Heartbeat:
    """*Invariants*: a killed peer is detected within BEAT_S, a vanished one within LIMIT_S + BEAT_S, a stalled one in
    ``activity.limit_s`` + BEAT_S. Every node logs a longer wait, with the missing ranks and their stacks."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        address: str,
        secret: bytes = b"",
        activity: Activity | None = None,
        alert: Callable[[], None] = lambda: None,
    ):
        """``alert``: called while waiting for the other ranks to connect; raises where waiting has become pointless."""
        self.rank, self.size, self._secret = rank, size, secret
        self.activity = activity or Activity()
        self.dead: dict[int, str] = {}
        self.left: set[int] = set()
        self.stacks: dict[int, str] = {}  # as last received
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._peers: dict[int, MessageSocket] = {}
        self._received_s: dict[int, float] = {}
        self._reports: dict[int, dict[str, Any]] = {}
        self._wanted: list[int] = []  # ranks whose stacks other threads request
        self._requesters: defaultdict[int, set[int]] = defaultdict(set)
        self._requested: list[int] = []
        # of the thread: its last iteration, and when it had been suspended before that
        self._turn_s, self._woke_s = boottime_s(), -math.inf
        self._noticed_s: float | None = None  # since when the wait has lasted that was logged
        try:
            if rank == 0:
                self._accept_all(store, address, alert)
            else:
                self._connect(store)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="paceline heartbeat", daemon=True)
        self._thread.start()

    def _accept_all(self, store: Any, address: str, alert: Callable[[], None]) -> None:
        nonce = secrets.token_bytes(NONCE)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        strangers: dict[socket.socket, bytes] = {}  # and what they have sent so far
        end = time.monotonic() + JOIN_S
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.create_server((address, 0), family=family))
            selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(_close, strangers)
            server.setblocking(False)
            selector.register(server, selectors.EVENT_READ)
            store.set("pulse", f"{address} {server.getsockname()[1]} {nonce.hex()}")
            while missing := set(range(1, self.size)) - set(self._peers):
                if (left_s := end - time.monotonic()) <= 0:
                    names = ", ".join(f"rank {rank}" for rank in sorted(missing))
                    raise LinkError(f"{names} did not send a heartbeat to {address} within {JOIN_S:.0f} s; look there")
                if not (ready := selector.select(min(left_s, WAIT_S))):
                    alert()
                for key, _ in ready:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        if key.fileobj is server:
                            connection, _ = server.accept()
                            connection.setblocking(False)
                            selector.register(connection, selectors.EVENT_READ)
                            strangers[connection] = b""
                        else:
                            connection = cast(socket.socket, key.fileobj)
                            if connection in strangers and self._identify(connection, strangers, nonce, missing):
                                selector.unregister(connection)
                    while len(strangers) > MAX_STRANGERS:
                        selector.unregister(oldest := next(iter(strangers)))
                        strangers.pop(oldest)
                        oldest.close()

    def _identify(
        self, connection: socket.socket, strangers: dict[socket.socket, bytes], nonce: bytes, missing: set[int]
    ) -> bool:
        """Reads its handshake. True once it is complete: a peer from now on, or closed."""
        data = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            data = connection.recv(SIZE + 2 - len(strangers[connection]))
        strangers[connection] += data
        hello = strangers[connection]
        if data and len(hello) < SIZE + 2:
            return False
        del strangers[connection]
        rank = int.from_bytes(hello[SIZE:], "little")
        if rank in missing and same(hello[:SIZE], mac(self._secret, BEAT, rank, nonce)):
            self._peers[rank] = MessageSocket(connection, self._authenticator(SERVER, rank, nonce))
            missing.discard(rank)
        else:
            connection.close()
        return True

    def _connect(self, store: Any) -> None:
        address, port, nonce = store.get("pulse").decode().split()
        try:
            hub = socket.create_connection((address, int(port)), timeout=JOIN_S)
            self._peers[0] = MessageSocket(hub, self._authenticator(CLIENT, self.rank, bytes.fromhex(nonce)))
            proof = mac(self._secret, BEAT, self.rank, bytes.fromhex(nonce))
            hub.sendall(proof + struct.pack("<H", self.rank))
        except OSError as error:
            raise LinkError(
                f"rank {self.rank} cannot send a heartbeat to rank 0 at {address}:{port}: {error}", 0
            ) from error

    def _authenticator(self, part: bytes, rank: int, nonce: bytes) -> MessageAuthenticator:
        return MessageAuthenticator(self._secret, part, rank, BEAT + nonce, MAX_BYTES)

    def _run(self) -> None:
        self._received_s = dict.fromkeys(self._peers, time.monotonic())
        with selectors.DefaultSelector() as selector:
            for peer, connection in self._peers.items():
                connection.line.setblocking(False)
                selector.register(connection.line, selectors.EVENT_READ, peer)
            next_beat, self._turn_s = time.monotonic(), boottime_s()
            while not self._closing.is_set() and selector.get_map():
                ready = selector.select(min(POLL_S, max(0.0, next_beat - time.monotonic())))
                if (still_s := boottime_s() - self._turn_s) > STILL_S:
                    self.activity.note_suspension(still_s)
                    self._woke_s = boottime_s()
                self._turn_s = boottime_s()
                for key, _ in ready:
                    if not self._receive(key.data):
                        selector.unregister(key.fileobj)
                while self._wanted:
                    self._request_stack(self._wanted.pop())
                left_s = next_beat - time.monotonic()
                # the last heartbeat has had time to be acknowledged, and this process was not suspended meanwhile
                if left_s < BEAT_S / 2 and still_s < BEAT_S:
                    for peer in self._declare_silent():
                        selector.unregister(self._peers[peer].line)
                if left_s <= 0:
                    next_beat = time.monotonic() + BEAT_S
                    self._beat()
                    self._log_late_wait()

    def _alive(self) -> list[int]:
        return [peer for peer in self._peers if peer not in self.dead and peer not in self.left]

    def _beat(self) -> None:
        """Sends a heartbeat to every peer."""
        report = json.dumps(self.peer_status() if self.rank == 0 else self.activity.status()).encode()
        for peer in self._alive():
            if not self._peers[peer].stuck:
                self._peers[peer].send(b"h", report)

    def _declare_silent(self) -> list[int]:
        """Declares the peers dead that have sent no heartbeat for too long. Returns them."""
        now, dead = time.monotonic(), []
        for peer in self._alive():
            silent_s = now - self._received_s[peer]
            if silent_s > LIMIT_S:
                stalled = self._peers[peer].arrived
                if not stalled or silent_s > self.activity.limit_s:
                    self._declare_dead(peer, (STALLED if stalled else SILENT).format(silent_s))
                    if not stalled:  # it cannot know which of the two is cut off
                        self.activity.note_suspension(silent_s)
                    dead.append(peer)
        return dead

    def _receive(self, peer: int) -> bool:
        """Reads a peer's messages; False once no more will come."""
        messages, more = self._peers[peer].receive()
        if messages:
            now = time.monotonic()
            if now - self._received_s[peer] > STILL_S:
                self.activity.note_suspension(now - self._received_s[peer])
            self._received_s[peer] = now
        try:
            for kind, body in messages:
                self._handle(peer, kind, body)
        except (ValueError, struct.error):
            self._declare_dead(peer, "sent malformed messages in place of heartbeats")
            more = False
        if not more and peer not in self.left:
            self._declare_dead(peer, "closed its connection: the process died")
        return more and peer not in self.left

    def _handle(self, peer: int, kind: bytes, body: bytes) -> None:
        if kind == b"q":
            self.left.add(peer)
        elif kind == b"h":
            report = json.loads(body)
            if not isinstance(report, dict):
                raise ValueError("no object")
            self._reports.update({int(rank): each for rank, each in report.items()} if peer == 0 else {peer: report})
        elif kind == b"x" and peer == 0:
            self._declare_dead(RANK.unpack_from(body)[0], f"{body[RANK.size :].decode()} (reported by rank 0)")
        elif kind == b"?":
            self._send_stack(peer, *RANK.unpack(body))
        elif kind == b"a":
            self._take_stack(RANK.unpack_from(body)[0], body[RANK.size :])

    def _declare_dead(self, peer: int, how: str) -> None:
        with self._changed:
            if peer in self.dead or peer == self.rank:
                return
            self.dead[peer] = how
            self._changed.notify_all()
        if self.rank == 0:
            for connection in self._peers.values():
                connection.send(b"x", RANK.pack(peer) + how.encode())

    def verdict(self, grace_s: float) -> int | None:
        """The first rank known to be dead, waiting up to ``grace_s`` to learn of one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.dead), grace_s)
        return next(iter(self.dead), None)

    def still_member(self, since: float) -> bool:
        """Whether the others have not declared this process dead, if it was suspended after ``since`` (`boottime_s`).

        If it was, it first reads what they sent before they continued; that takes one heartbeat.
        """
        if boottime_s() - self._turn_s > BEAT_S:  # it may have been suspended just now
            turn_s = self._turn_s
            self._wait_for(lambda: self._turn_s > turn_s, 2 * BEAT_S)
        if self._woke_s < since:
            return True
        now = time.monotonic()
        hubs = self._alive() if self.rank == 0 else [0]
        self._wait_for(lambda: self.dead or all(self._received_s.get(hub, 0.0) > now for hub in hubs), 2.5 * BEAT_S)
        return not self.dead

    def _wait_for(self, condition: Callable[[], object], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not condition() and time.monotonic() < end and self._thread.is_alive():
            time.sleep(POLL_S / 5)

    # status and stacks

    def peer_status(self) -> dict[int, dict[str, Any]]:
        """By rank: its last report (`Activity.tell`), and ``silent_s``, the seconds since then."""
        now, found = time.monotonic(), {rank: dict(report) for rank, report in sorted(self._reports.items())}
        for peer, received_s in self._received_s.items():
            if peer in found:
                found[peer]["silent_s"] = round(now - received_s, 1)
                found[peer]["way_s"] = self._peers[peer].way_s
        found[self.rank] = {**self.activity.status(), "silent_s": 0.0}
        return {rank: report for rank, report in sorted(found.items()) if rank not in self.left}

    def peer_stack(self, rank: int, limit_s: float = ANSWER_S) -> str:
        """That rank's stack; empty where none arrives in time. For any thread but the heartbeat's own."""
        with self._changed:
            self.stacks.pop(rank, None)
            self._wanted.append(rank)
            self._changed.wait_for(lambda: rank in self.stacks or self._closing.is_set(), limit_s)
            return self.stacks.get(rank, "")

    def _request_stack(self, rank: int) -> None:
        if rank == self.rank:
            self._take_stack(rank, self.activity.stacks().encode(errors="replace"))
        elif connection := self._peers.get(rank if self.rank == 0 else 0):
            connection.send(b"?", RANK.pack(rank))

    def _send_stack(self, peer: int, rank: int) -> None:
        if rank == self.rank:
            stacks = self.activity.stacks().encode(errors="replace")  # a folder's name need not be UTF-8
            self._peers[peer].send(b"a", RANK.pack(rank) + stacks)
        elif self.rank == 0 and rank in self._peers:
            self._requesters[rank].add(peer)
            self._peers[rank].send(b"?", RANK.pack(rank))

    def _take_stack(self, rank: int, stack: bytes) -> None:
        with self._changed:
            self.stacks[rank] = stack.decode(errors="replace")
            self._changed.notify_all()
        for peer in self._requesters.pop(rank, ()):
            self._peers[peer].send(b"a", RANK.pack(rank) + stack)

    def _log_late_wait(self) -> None:
        """Logs, once, a wait that has lasted too long, with the stacks of the missing ranks."""
        since_s = self.activity.since()
        if since_s is None or since_s == self._noticed_s or self.dead:
            return
        reports = self.peer_status()
        absent = activity.absent_ranks(reports, self.rank)
        silent = any(not activity.responds(reports[rank]) for rank in absent)
        limit_s = min(LIMIT_S, self.activity.limit_s) if silent else self.activity.limit_s
        # within these seconds a failure is detected and reported
        limit_s += GRACE_S if absent else NONE_MISSING_S
        waited_s = time.monotonic() - since_s
        if waited_s < limit_s:
            self._requested = []
            return
        if not self._requested:
            self._requested = absent
            for rank in absent:
                self.stacks.pop(rank, None)
                self._request_stack(rank)
        if waited_s < limit_s + ANSWER_S and any(rank not in self.stacks for rank in absent):
            return
        self._noticed_s, self._requested = since_s, []
        lines = [activity.line(reports, self.rank, self.size, absent), *activity.stacks(reports, absent, self.stacks)]
        self.activity.notice("\n".join(lines))

    def abandon(self) -> None:
        """Ends without a message, so that each rank still in an operation of this link learns that it has failed."""
        self._closing.set()
        self._thread.join(2 * BEAT_S)
        with self._changed:
            self.dead.setdefault(self.rank, "abandoned this link")
            self._changed.notify_all()
        self._close_sockets()

    def close(self) -> None:
        """Leaves as a rank that has ended normally. Once."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(2 * BEAT_S)
        for connection in self._peers.values():
            connection.send(b"q")
        self._close_sockets()

    def _close_sockets(self) -> None:
        for connection in self._peers.values():
            connection.line.close()


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()
