"""Failure detector: heartbeats between rank 0 and all ranks, one per second, which carry each rank's activity.

A dense exchange may take minutes, so silence in an operation says nothing. A closed socket (the process died) does, and
so does a peer without a beat: for LIMIT_S where its machine does not confirm what it is sent (the machine or its cable
died), for as long as a late step where it does (the process is stalled). Rank 0 tells the others.

    rank -> 0:  'h' alive: what it is at   'q' leaving in peace   '?' where does that rank stand   'a' a stack
    0 -> rank:  'h' alive: what everyone is at   'q', '?', 'a' likewise   'x' that rank is dead: how
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
STILL_S = 3.0  # in which this process ran nothing, or heard nothing of a peer, before it is in doubt of the others
GRACE_S, NOBODY_S = 2.0, 7.0  # before a wait is told of: with somebody to wait for, and with nobody
ANSWER_S = 2.5
JOIN_S = 60.0
WAIT_S = 0.5
NONCE = 16  # bytes
BEAT = b"beat"  # whose proof is no joiner's at the meeting point
MAX_STRANGERS = 64
RANK = struct.Struct("<H")
SILENT = "has been silent for {:.0f} s"
STALLED = "is stalled: its machine answers, its process has not for {:.0f} s (stopped, swapped out, or starved)"


class Heartbeat:
    """*Laws*: a killed peer is known within BEAT_S, a vanished one within LIMIT_S + BEAT_S, a stalled one within
    ``activity.limit_s`` + BEAT_S; a wait beyond it is told on every node, with who is missing and its stack."""

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
        """``alert``: called while waiting for the others' first; raises where waiting has become pointless."""
        self.rank, self.size, self._secret = rank, size, secret
        self.activity = activity or Activity()
        self.dead: dict[int, str] = {}
        self.left: set[int] = set()
        self.stacks: dict[int, str] = {}  # as last answered
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._peers: dict[int, MessageSocket] = {}
        self._heard: dict[int, float] = {}
        self._told: dict[int, dict[str, Any]] = {}
        self._wanted: list[int] = []  # stacks that other threads ask for
        self._askers: defaultdict[int, set[int]] = defaultdict(set)
        self._questions: list[int] = []
        # of the thread: its last turn, and when it had stood still
        self._turn_s, self._woke_s = boottime_s(), -math.inf
        self._noticed_s: float | None = None  # the wait that people have been told of
        try:
            if rank == 0:
                self._gather(store, address, alert)
            else:
                self._reach(store)
        except BaseException:
            self._hang_up()
            raise
        self._thread = threading.Thread(target=self._run, name="paceline pulse", daemon=True)
        self._thread.start()

    def _gather(self, store: Any, address: str, alert: Callable[[], None]) -> None:
        nonce = secrets.token_bytes(NONCE)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        strangers: dict[socket.socket, bytes] = {}  # and what they have said so far
        end = time.monotonic() + JOIN_S
        with contextlib.ExitStack() as held:
            server = held.enter_context(socket.create_server((address, 0), family=family))
            eyes = held.enter_context(selectors.DefaultSelector())
            held.callback(_close, strangers)
            server.setblocking(False)
            eyes.register(server, selectors.EVENT_READ)
            store.set("pulse", f"{address} {server.getsockname()[1]} {nonce.hex()}")
            while missing := set(range(1, self.size)) - set(self._peers):
                if (left_s := end - time.monotonic()) <= 0:
                    who = ", ".join(f"rank {rank}" for rank in sorted(missing))
                    raise LinkError(f"{who} did not send a heartbeat to {address} within {JOIN_S:.0f} s; look there")
                if not (ready := eyes.select(min(left_s, WAIT_S))):
                    alert()
                for key, _ in ready:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        if key.fileobj is server:
                            line, _ = server.accept()
                            line.setblocking(False)
                            eyes.register(line, selectors.EVENT_READ)
                            strangers[line] = b""
                        else:
                            line = cast(socket.socket, key.fileobj)
                            if line in strangers and self._meet(line, strangers, nonce, missing):
                                eyes.unregister(line)
                    while len(strangers) > MAX_STRANGERS:
                        eyes.unregister(oldest := next(iter(strangers)))
                        strangers.pop(oldest)
                        oldest.close()

    def _meet(
        self, line: socket.socket, strangers: dict[socket.socket, bytes], nonce: bytes, missing: set[int]
    ) -> bool:
        """Whether it has said all that it may: a peer from now on, or sent away."""
        words = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            words = line.recv(SIZE + 2 - len(strangers[line]))
        strangers[line] += words
        said = strangers[line]
        if words and len(said) < SIZE + 2:
            return False
        del strangers[line]
        rank = int.from_bytes(said[SIZE:], "little")
        if rank in missing and same(said[:SIZE], mac(self._secret, BEAT, rank, nonce)):
            self._peers[rank] = MessageSocket(line, self._seal(SERVER, rank, nonce))
            missing.discard(rank)
        else:
            line.close()
        return True

    def _reach(self, store: Any) -> None:
        address, port, nonce = store.get("pulse").decode().split()
        try:
            hub = socket.create_connection((address, int(port)), timeout=JOIN_S)
            self._peers[0] = MessageSocket(hub, self._seal(CLIENT, self.rank, bytes.fromhex(nonce)))
            proof = mac(self._secret, BEAT, self.rank, bytes.fromhex(nonce))
            hub.sendall(proof + struct.pack("<H", self.rank))
        except OSError as error:
            raise LinkError(
                f"rank {self.rank} cannot send a heartbeat to rank 0 at {address}:{port}: {error}", 0
            ) from error

    def _seal(self, part: bytes, rank: int, nonce: bytes) -> MessageAuthenticator:
        return MessageAuthenticator(self._secret, part, rank, BEAT + nonce, MAX_BYTES)

    def _run(self) -> None:
        self._heard = dict.fromkeys(self._peers, time.monotonic())
        with selectors.DefaultSelector() as eyes:
            for peer, line in self._peers.items():
                line.line.setblocking(False)
                eyes.register(line.line, selectors.EVENT_READ, peer)
            next_beat, self._turn_s = time.monotonic(), boottime_s()
            while not self._closing.is_set() and eyes.get_map():
                said = eyes.select(min(POLL_S, max(0.0, next_beat - time.monotonic())))
                if (still_s := boottime_s() - self._turn_s) > STILL_S:
                    self.activity.woke(still_s)
                    self._woke_s = boottime_s()
                self._turn_s = boottime_s()
                for key, _ in said:
                    if not self._hear(key.data):
                        eyes.unregister(key.fileobj)
                while self._wanted:
                    self._ask(self._wanted.pop())
                left_s = next_beat - time.monotonic()
                # the last beat has had time to be confirmed; who has stood still itself has not listened
                if left_s < BEAT_S / 2 and still_s < BEAT_S:
                    for peer in self._judge():
                        eyes.unregister(self._peers[peer].line)
                if left_s <= 0:
                    next_beat = time.monotonic() + BEAT_S
                    self._beat()
                    self._mind_the_wait()

    def _alive(self) -> list[int]:
        return [peer for peer in self._peers if peer not in self.dead and peer not in self.left]

    def _beat(self) -> None:
        """A sign of life to everyone."""
        news = json.dumps(self.peer_status() if self.rank == 0 else self.activity.tell()).encode()
        for peer in self._alive():
            if not self._peers[peer].stuck:
                self._peers[peer].send(b"h", news)

    def _judge(self) -> list[int]:
        """The peers that have been without a sign of life for too long, who are dead from now on."""
        now, buried = time.monotonic(), []
        for peer in self._alive():
            silent_s = now - self._heard[peer]
            if silent_s > LIMIT_S:
                stalled = self._peers[peer].arrived
                if not stalled or silent_s > self.activity.limit_s:
                    self._bury(peer, (STALLED if stalled else SILENT).format(silent_s))
                    if not stalled:  # which of the two cannot be heard, it cannot tell
                        self.activity.woke(silent_s)
                    buried.append(peer)
        return buried

    def _hear(self, peer: int) -> bool:
        """Reads what a peer says; False once it will say no more."""
        said, more = self._peers[peer].receive()
        if said:
            now = time.monotonic()
            if now - self._heard[peer] > STILL_S:
                self.activity.woke(now - self._heard[peer])
            self._heard[peer] = now
        try:
            for kind, body in said:
                self._take(peer, kind, body)
        except (ValueError, struct.error):
            self._bury(peer, "spoke nonsense in place of heartbeats")
            more = False
        if not more and peer not in self.left:
            self._bury(peer, "closed its connection: the process died")
        return more and peer not in self.left

    def _take(self, peer: int, kind: bytes, body: bytes) -> None:
        if kind == b"q":
            self.left.add(peer)
        elif kind == b"h":
            told = json.loads(body)
            if not isinstance(told, dict):
                raise ValueError("no object")
            self._told.update({int(rank): each for rank, each in told.items()} if peer == 0 else {peer: told})
        elif kind == b"x" and peer == 0:
            self._bury(RANK.unpack_from(body)[0], f"{body[RANK.size :].decode()} (rank 0 said so)")
        elif kind == b"?":
            self._asked(peer, *RANK.unpack(body))
        elif kind == b"a":
            self._answered(RANK.unpack_from(body)[0], body[RANK.size :])

    def _bury(self, peer: int, how: str) -> None:
        with self._changed:
            if peer in self.dead or peer == self.rank:
                return
            self.dead[peer] = how
            self._changed.notify_all()
        if self.rank == 0:
            for line in self._peers.values():
                line.send(b"x", RANK.pack(peer) + how.encode())

    def verdict(self, grace_s: float) -> int | None:
        """The first rank known to be dead, waiting up to ``grace_s`` to learn of one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.dead), grace_s)
        return next(iter(self.dead), None)

    def still_member(self, since: float) -> bool:
        """Whether the others have not given this process up, as far as it stood still ``since`` then, by `boottime_s`.

        Where it did, it hears first what they said before they went on; that takes a beat.
        """
        if boottime_s() - self._turn_s > BEAT_S:  # it may have stood still just now
            turn_s = self._turn_s
            self._wait_for(lambda: self._turn_s > turn_s, 2 * BEAT_S)
        if self._woke_s < since:
            return True
        now = time.monotonic()
        hubs = self._alive() if self.rank == 0 else [0]
        self._wait_for(lambda: self.dead or all(self._heard.get(hub, 0.0) > now for hub in hubs), 2.5 * BEAT_S)
        return not self.dead

    def _wait_for(self, what: Callable[[], object], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not what() and time.monotonic() < end and self._thread.is_alive():
            time.sleep(POLL_S / 5)

    # what everyone is at

    def peer_status(self) -> dict[int, dict[str, Any]]:
        """By rank: what it said of itself last (`Activity.tell`), and ``silent_s``, for how long it has not."""
        now, found = time.monotonic(), {rank: dict(told) for rank, told in sorted(self._told.items())}
        for peer, heard_s in self._heard.items():
            if peer in found:
                found[peer]["silent_s"] = round(now - heard_s, 1)
                found[peer]["way_s"] = self._peers[peer].way_s
        found[self.rank] = {**self.activity.tell(), "silent_s": 0.0}
        return {rank: told for rank, told in sorted(found.items()) if rank not in self.left}

    def peer_stack(self, rank: int, limit_s: float = ANSWER_S) -> str:
        """Where that rank stands in its code; empty where it does not say so in time. Any thread's but the pulse's."""
        with self._changed:
            self.stacks.pop(rank, None)
            self._wanted.append(rank)
            self._changed.wait_for(lambda: rank in self.stacks or self._closing.is_set(), limit_s)
            return self.stacks.get(rank, "")

    def _ask(self, rank: int) -> None:
        if rank == self.rank:
            self._answered(rank, self.activity.stacks().encode(errors="replace"))
        elif line := self._peers.get(rank if self.rank == 0 else 0):
            line.send(b"?", RANK.pack(rank))

    def _asked(self, peer: int, rank: int) -> None:
        if rank == self.rank:
            stacks = self.activity.stacks().encode(errors="replace")  # a folder's name need not be UTF-8
            self._peers[peer].send(b"a", RANK.pack(rank) + stacks)
        elif self.rank == 0 and rank in self._peers:
            self._askers[rank].add(peer)
            self._peers[rank].send(b"?", RANK.pack(rank))

    def _answered(self, rank: int, stack: bytes) -> None:
        with self._changed:
            self.stacks[rank] = stack.decode(errors="replace")
            self._changed.notify_all()
        for peer in self._askers.pop(rank, ()):
            self._peers[peer].send(b"a", RANK.pack(rank) + stack)

    def _mind_the_wait(self) -> None:
        """Tells people, once, of a wait that has lasted too long, with the stacks of those who are not there."""
        since_s = self.activity.since()
        if since_s is None or since_s == self._noticed_s or self.dead:
            return
        everyone = self.peer_status()
        absent = activity.missing(everyone, self.rank)
        silent = any(not activity.answers(everyone[rank]) for rank in absent)
        limit_s = min(LIMIT_S, self.activity.limit_s) if silent else self.activity.limit_s
        # a loss is told by itself within these seconds
        limit_s += GRACE_S if absent else NOBODY_S
        waited_s = time.monotonic() - since_s
        if waited_s < limit_s:
            self._questions = []
            return
        if not self._questions:
            self._questions = absent
            for rank in absent:
                self.stacks.pop(rank, None)
                self._ask(rank)
        if waited_s < limit_s + ANSWER_S and any(rank not in self.stacks for rank in absent):
            return
        self._noticed_s, self._questions = since_s, []
        words = [activity.line(everyone, self.rank, self.size, absent), *activity.stacks(everyone, absent, self.stacks)]
        self.activity.notice("\n".join(words))

    def abandon(self) -> None:
        """Ends without a word, so that whoever is still in an operation of this link learns that it is dead."""
        self._closing.set()
        self._thread.join(2 * BEAT_S)
        with self._changed:
            self.dead.setdefault(self.rank, "gave this link up")
            self._changed.notify_all()
        self._hang_up()

    def close(self) -> None:
        """Leaves in peace. Once."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(2 * BEAT_S)
        for line in self._peers.values():
            line.send(b"q")
        self._hang_up()

    def _hang_up(self) -> None:
        for line in self._peers.values():
            line.line.close()


def _close(lines: Iterable[socket.socket]) -> None:
    for line in lines:
        line.close()
