"""Who is alive: a beat per second between rank 0 and everyone, on sockets of its own.

A dense exchange may take minutes, so silence in an operation says nothing. A closed socket (the
process died) or LIMIT_S without a beat (the machine or its cable died) does. Rank 0 tells the others.

    rank -> 0:  '.' alive   'q' leaving in peace
    0 -> rank:  '.' alive   'q' leaving in peace   'x' + two bytes: that rank is dead
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from typing import Any, cast

from paceline.contract import LinkError

BEAT_S = 1.0
GLANCE_S = 0.1  # how soon the end of this process is noticed
LIMIT_S = 5.0
JOIN_S = 60.0
TOKEN = 16  # bytes
MAX_STRANGERS = 64


class Pulse:
    """*Laws*: a killed peer is known within BEAT_S, a vanished one within LIMIT_S + 2 BEAT_S."""

    def __init__(self, rank: int, size: int, store: Any, address: str):
        self.rank, self.size = rank, size
        self.dead: dict[int, str] = {}
        self.left: set[int] = set()
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._peers: dict[int, socket.socket] = {}
        self._heard: defaultdict[int, bytes] = defaultdict(bytes)  # of a word that has not arrived whole
        if rank == 0:
            self._gather(store, address)
        else:
            self._reach(store)
        self._thread = threading.Thread(target=self._run, name="paceline pulse", daemon=True)
        self._thread.start()

    def _gather(self, store: Any, address: str) -> None:
        token = secrets.token_bytes(TOKEN)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        strangers: dict[socket.socket, bytes] = {}  # and what they have said so far
        end = time.monotonic() + JOIN_S
        with socket.create_server((address, 0), family=family) as server, selectors.DefaultSelector() as eyes:
            server.setblocking(False)
            eyes.register(server, selectors.EVENT_READ)
            store.set("pulse", f"{address} {server.getsockname()[1]} {token.hex()}")
            while missing := set(range(1, self.size)) - set(self._peers):
                if (left_s := end - time.monotonic()) <= 0:
                    who = ", ".join(f"rank {rank}" for rank in sorted(missing))
                    raise LinkError(f"{who} did not send a heartbeat to {address} within {JOIN_S:.0f} s; look there")
                for key, _ in eyes.select(left_s):
                    with contextlib.suppress(BlockingIOError):
                        if key.fileobj is server:
                            line, _ = server.accept()
                            line.setblocking(False)
                            eyes.register(line, selectors.EVENT_READ)
                            strangers[line] = b""
                        else:
                            line = cast(socket.socket, key.fileobj)
                            if line in strangers and self._meet(line, strangers, token, missing):
                                eyes.unregister(line)
                    while len(strangers) > MAX_STRANGERS:
                        eyes.unregister(oldest := next(iter(strangers)))
                        strangers.pop(oldest)
                        oldest.close()
        for line in strangers:
            line.close()

    def _meet(
        self, line: socket.socket, strangers: dict[socket.socket, bytes], token: bytes, missing: set[int]
    ) -> bool:
        """Whether it has said all that it may: a peer from now on, or sent away."""
        words = b""
        with contextlib.suppress(ConnectionError):
            words = line.recv(TOKEN + 2 - len(strangers[line]))
        strangers[line] += words
        said = strangers[line]
        if words and len(said) < TOKEN + 2:
            return False
        del strangers[line]
        rank = int.from_bytes(said[TOKEN:], "little")
        if hmac.compare_digest(said[:TOKEN], token) and len(said) == TOKEN + 2 and rank in missing:
            self._peers[rank] = line
            missing.discard(rank)
        else:
            line.close()
        return True

    def _reach(self, store: Any) -> None:
        address, port, token = store.get("pulse").decode().split()
        try:
            hub = socket.create_connection((address, int(port)), timeout=JOIN_S)
            hub.sendall(bytes.fromhex(token) + struct.pack("<H", self.rank))
        except OSError as error:
            raise LinkError(
                f"rank {self.rank} cannot send a heartbeat to rank 0 at {address}:{port}: {error}", 0
            ) from error
        self._peers[0] = hub

    def _run(self) -> None:
        heard = dict.fromkeys(self._peers, time.monotonic())
        eyes = selectors.DefaultSelector()
        for peer, line in self._peers.items():
            line.setblocking(False)
            eyes.register(line, selectors.EVENT_READ, peer)
        next_beat = time.monotonic()
        while not self._closing.is_set() and eyes.get_map():
            for key, _ in eyes.select(min(GLANCE_S, max(0.0, next_beat - time.monotonic()))):
                if self._hear(key.data):
                    heard[key.data] = time.monotonic()
                else:
                    eyes.unregister(key.fileobj)
            if time.monotonic() < next_beat:
                continue
            next_beat = time.monotonic() + BEAT_S
            for peer, line in self._peers.items():
                if peer in self.dead or peer in self.left:
                    continue
                with contextlib.suppress(OSError):
                    line.send(b".")
                silent_s = time.monotonic() - heard[peer]
                if silent_s > LIMIT_S:
                    self._bury(peer, f"has been silent for {silent_s:.0f} s")
                    eyes.unregister(line)

    def _hear(self, peer: int) -> bool:
        """Reads what a peer says; False once it will say no more."""
        try:
            words = self._peers[peer].recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            words = b""
        said = self._heard[peer] + words
        while said:
            if said[:1] == b"q":
                self.left.add(peer)
            elif said[:1] == b"x":
                if len(said) < 3:
                    break
                self._bury(struct.unpack("<H", said[1:3])[0], "died (rank 0 said so)")
                said = said[2:]
            said = said[1:]
        self._heard[peer] = said
        if not words and peer not in self.left:
            self._bury(peer, "closed its connection: the process died")
        return bool(words) and peer not in self.left

    def _bury(self, peer: int, how: str) -> None:
        with self._changed:
            if peer in self.dead or peer == self.rank:
                return
            self.dead[peer] = how
            self._changed.notify_all()
        if self.rank == 0:
            for line in self._peers.values():
                with contextlib.suppress(OSError):
                    line.send(b"x" + struct.pack("<H", peer))

    def verdict(self, grace_s: float) -> int | None:
        """The first rank known to be dead, waiting up to ``grace_s`` to learn of one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.dead), grace_s)
        return next(iter(self.dead), None)

    def abandon(self) -> None:
        """Ends without a word, so that whoever is still in an operation of this link learns that it is dead."""
        self._closing.set()
        self._thread.join(2 * BEAT_S)
        with self._changed:
            self.dead.setdefault(self.rank, "gave this link up")
            self._changed.notify_all()
        for line in self._peers.values():
            line.close()

    def close(self) -> None:
        """Leaves in peace. Once."""
        if self._closing.is_set():
            return
        self._closing.set()
        for line in self._peers.values():
            with contextlib.suppress(OSError):
                line.send(b"q")
        self._thread.join(2 * BEAT_S)
        for line in self._peers.values():
            line.close()
