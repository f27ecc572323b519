"""Bulk channel from a member to a joining node: large messages on a connection of its own, beside training.

    hatch -> joiner:  magic, version, nonce            as at the meeting point
    joiner -> hatch:  magic, version, nonce, proof
    hatch -> joiner:  proof, or REFUSED
    then each way:   length, bytes, seal; a message is its length, and as many parts as it takes

A seal is HMAC-SHA256 over a part's number and bytes, with a key of this conversation and direction, and is checked
before the next part is read. Who listens on the wire can read, unless the secret is an `EncryptionKey` one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable

from paceline.errors import LinkError
from paceline.link.net.auth import CLIENT, HEADER, HELLO, REFUSED, SERVER, SIZE, TAG, StreamCipher, exactly, mac, same
from paceline.link.net.framing import close_on_fork, closed_on_error
from paceline.link.net.store_client import NO_RANK_YET, connect

HANDSHAKE_S = 5.0
STALL_S = 8.0  # in which nothing could be sent, or came: all others may be waiting for who takes it
PART_BYTES = 1 << 22
MAX_STRANGERS = 16
RETRY_DELAY_S = 0.1  # after an accept that failed
LENGTH, NUMBER = struct.Struct("<I"), struct.Struct("<Q")
DOWN, UP = b"bulk from the hatch", b"bulk from the guest"


class BulkChannel:
    """A line whose ends have proved the secret. Raises LinkError where the other end is gone, or is another's."""

    def __init__(self, line: socket.socket, secret: bytes, rank: int, nonces: bytes, directions: tuple[bytes, bytes]):
        self._line = line
        self._says, self._hears = (mac(secret, each, rank, nonces) for each in directions)
        veils = (mac(secret, b"veil of " + each, rank, nonces) for each in directions)
        self._hides, self._shows = (StreamCipher(secret, key) for key in veils)
        self._num_said = self._num_heard = 0
        self._deadline_mode_s = math.inf
        line.settimeout(STALL_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, parts: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """One message, of which no more than a part is in memory twice."""
        try:
            self._put(NUMBER.pack(num_bytes))
            for part in parts:
                for start in range(0, len(part), PART_BYTES):
                    self._put(part[start : start + PART_BYTES])
        except OSError as error:
            raise LinkError(f"a joining node has failed ({error})") from error

    def receive(self) -> bytearray:
        try:
            (num_bytes,) = NUMBER.unpack(self._take(bytearray(NUMBER.size)))
            message, at = bytearray(num_bytes), 0
            while at < num_bytes:
                at += len(self._take(memoryview(message)[at : at + PART_BYTES]))
        except (OSError, ValueError) as error:
            raise LinkError(f"the node that was sending its state has failed ({error})") from error
        return message

    def waits(self, limit_s: float) -> bool:
        """Whether something comes within so long."""
        eyes = select.poll()  # `select.select` knows no file above 1,023
        eyes.register(self._line, select.POLLIN)
        return bool(eyes.poll(1e3 * limit_s))

    def set_deadline_mode(self) -> None:
        """From now on a part that takes longer than STALL_S is too much."""
        self._deadline_mode_s = time.monotonic()

    def _push(self, part: bytes | memoryview) -> None:
        begin, view = time.monotonic(), memoryview(part)
        while view:
            view = view[self._line.send(view) :]  # a deadline for each: a slow wire is not a broken one
            if time.monotonic() - max(begin, self._deadline_mode_s) > STALL_S:
                raise TimeoutError("it takes what it is given too slowly")

    def _put(self, part: bytes | memoryview) -> None:
        if self._hides.hides:
            part = self._hides.encrypt(part, self._num_said)
        for each in (LENGTH.pack(len(part)), part, self._seal(self._says, self._num_said, part)):
            self._push(each)
        self._num_said += 1

    def _take(self, into: bytearray | memoryview) -> memoryview:
        (length,) = LENGTH.unpack(exactly(self._line, LENGTH.size))
        view, more = memoryview(into), TAG if self._shows.hides else 0
        if not more <= length <= len(view) + more:
            raise ValueError(f"a part of {length} bytes, where {len(view)} were to come")
        heard, at = memoryview(bytearray(length)) if more else view[:length], 0
        while at < length:
            count = self._line.recv_into(heard[at:])
            if not count:
                raise ConnectionResetError("it hung up")
            at += count
        if not same(exactly(self._line, SIZE), self._seal(self._hears, self._num_heard, heard)):
            raise ValueError("a part with a wrong seal")
        if more:
            view[: length - more] = self._shows.decrypt(heard, self._num_heard)
        self._num_heard += 1
        return view[: length - more]

    @staticmethod
    def _seal(key: bytes, number: int, part: bytes | memoryview) -> bytes:
        seal = hmac.new(key, NUMBER.pack(number), hashlib.sha256)
        seal.update(part)
        return seal.digest()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # whoever sends in another thread hears of it
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()


class BulkServer:
    """Listens on one address. ``here``: the lines of those who have proved the secret, by their names.

    *Laws*: a stranger has HANDSHAKE_S for each of a few bytes, and there are never more than MAX_STRANGERS of them: the
    oldest goes.
    """

    def __init__(self, address: str, secret: bytes):
        self._secret, self._closed = secret, False
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = close_on_fork(socket.create_server((address, 0), family=family, backlog=MAX_STRANGERS))
        self.address, self.port = self._server.getsockname()[:2]
        self.here: dict[str, BulkChannel] = {}
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="paceline hatch", daemon=True).start()

    def _run(self) -> None:
        while not self._closed:
            try:
                line, _ = self._server.accept()
            except OSError:  # it was closed; or too many files are open, which passes
                time.sleep(RETRY_DELAY_S)
            else:
                with self._lock:
                    if len(self._strangers) >= MAX_STRANGERS:
                        oldest = next(iter(self._strangers))
                        del self._strangers[oldest]
                        with contextlib.suppress(OSError):
                            oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
                    self._strangers[close_on_fork(line)] = None
                threading.Thread(target=self._admit, args=(line,), name="paceline hatch", daemon=True).start()

    def _admit(self, line: socket.socket) -> None:
        try:
            name, bulk = self._hear(line)
        except (OSError, ValueError, LinkError):
            line.close()
        else:
            with self._lock:  # by another line it is here anew
                before = self.here.get(name)
                if not self._closed:
                    self.here[name] = bulk
            for gone in (before, bulk if self._closed else None):
                if gone is not None:
                    gone.close()
        finally:
            with self._lock:
                self._strangers.pop(line, None)

    def _hear(self, line: socket.socket) -> tuple[str, BulkChannel]:
        line.settimeout(HANDSHAKE_S)
        nonce = secrets.token_bytes(SIZE)
        line.sendall(HEADER + nonce)
        header, rank, other, proof = HELLO.unpack(exactly(line, HELLO.size))
        nonces = nonce + other
        if header != HEADER or not same(proof, mac(self._secret, CLIENT, rank, nonces)):
            line.sendall(REFUSED)
            raise ValueError("a stranger")
        line.sendall(mac(self._secret, SERVER, rank, nonces))
        bulk = BulkChannel(line, self._secret, rank, nonces, (DOWN, UP))
        return bulk.receive().decode(), bulk

    def close(self) -> None:
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):  # wakes whoever waits in accept
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._lock:
            here = list(self.here.values())
        for bulk in here:
            bulk.close()


def reach(address: str, port: int, secret: bytes, name: str) -> BulkChannel:
    """The joiner's end, under its name. Raises LinkError."""
    try:
        line = connect(address, port, HANDSHAKE_S)
        with closed_on_error(line):
            return _greet(line, secret, name)
    except OSError as error:
        raise LinkError(f"the node at {address}:{port} that was to send its state has failed ({error})") from error


def _greet(line: socket.socket, secret: bytes, name: str) -> BulkChannel:
    line.settimeout(HANDSHAKE_S)
    header, nonce = exactly(line, len(HEADER)), secrets.token_bytes(SIZE)
    if header != HEADER:
        raise LinkError("what answers there speaks another version of paceline; install the same on every node")
    nonces = exactly(line, SIZE) + nonce
    line.sendall(HELLO.pack(HEADER, NO_RANK_YET, nonce, mac(secret, CLIENT, NO_RANK_YET, nonces)))
    if not same(exactly(line, SIZE), mac(secret, SERVER, NO_RANK_YET, nonces)):
        raise LinkError("the node that was to give its state did not prove that it belongs to this run")
    bulk = BulkChannel(line, secret, NO_RANK_YET, nonces, (UP, DOWN))
    words = name.encode()
    bulk.send([words], len(words))
    return bulk
