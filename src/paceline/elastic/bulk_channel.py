"""Bulk channel from a member to a joining node: large messages on a connection of its own, beside training.

    server -> joiner:  magic, version, nonce            as at the rendezvous
    joiner -> server:  magic, version, nonce, MAC
    server -> joiner:  MAC, or REFUSED
    then each way:     length, bytes, MAC; a message is its length, and as many parts as it takes

The MAC of a part is HMAC-SHA256 over its number and bytes, with a key of this connection and direction. It is checked
before the next part is read. The parts are not encrypted, unless the secret is an `EncryptionKey` one.
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
STALL_S = 8.0  # without progress, before the other end counts as failed: all members may be waiting for it
PART_BYTES = 1 << 22
MAX_STRANGERS = 16
RETRY_DELAY_S = 0.1  # after an accept that failed
LENGTH, NUMBER = struct.Struct("<I"), struct.Struct("<Q")
DOWN, UP = b"bulk from the hatch", b"bulk from the guest"


class BulkChannel:
    """An authenticated connection. Raises LinkError where the other end has failed, or a MAC is wrong."""

    def __init__(self, connection: socket.socket, secret: bytes, rank: int, nonces: bytes, labels: tuple[bytes, bytes]):
        self._connection = connection
        self._send_key, self._receive_key = (mac(secret, each, rank, nonces) for each in labels)
        keys = (mac(secret, b"veil of " + each, rank, nonces) for each in labels)
        self._send_cipher, self._receive_cipher = (StreamCipher(secret, key) for key in keys)
        self._num_sent = self._num_received = 0
        self._deadline_from_s = math.inf
        connection.settimeout(STALL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, parts: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """One message, of which at most a part is in memory twice."""
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
        """Whether data arrives within so many seconds."""
        poll = select.poll()  # `select.select` takes no file descriptor above 1,023
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(1e3 * limit_s))

    def set_deadline_mode(self) -> None:
        """From now on a part that takes longer than STALL_S to send is an error."""
        self._deadline_from_s = time.monotonic()

    def _push(self, part: bytes | memoryview) -> None:
        begin, view = time.monotonic(), memoryview(part)
        while view:
            view = view[self._connection.send(view) :]  # a deadline for each call: a slow network is no failure
            if time.monotonic() - max(begin, self._deadline_from_s) > STALL_S:
                raise TimeoutError("it receives its state too slowly")

    def _put(self, part: bytes | memoryview) -> None:
        if self._send_cipher.hides:
            part = self._send_cipher.encrypt(part, self._num_sent)
        for each in (LENGTH.pack(len(part)), part, self._mac(self._send_key, self._num_sent, part)):
            self._push(each)
        self._num_sent += 1

    def _take(self, into: bytearray | memoryview) -> memoryview:
        (length,) = LENGTH.unpack(exactly(self._connection, LENGTH.size))
        view, tag = memoryview(into), TAG if self._receive_cipher.hides else 0
        if not tag <= length <= len(view) + tag:
            raise ValueError(f"a part of {length} bytes, where {len(view)} were expected")
        received, at = memoryview(bytearray(length)) if tag else view[:length], 0
        while at < length:
            count = self._connection.recv_into(received[at:])
            if not count:
                raise ConnectionResetError("it closed the connection")
            at += count
        if not same(exactly(self._connection, SIZE), self._mac(self._receive_key, self._num_received, received)):
            raise ValueError("a part with a wrong MAC")
        if tag:
            view[: length - tag] = self._receive_cipher.decrypt(received, self._num_received)
        self._num_received += 1
        return view[: length - tag]

    @staticmethod
    def _mac(key: bytes, number: int, part: bytes | memoryview) -> bytes:
        code = hmac.new(key, NUMBER.pack(number), hashlib.sha256)
        code.update(part)
        return code.digest()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # ends a send in another thread
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class BulkServer:
    """Listens on one address. ``channels``: those of authenticated joining nodes, by their names.

    *Invariants*: an unauthenticated connection has HANDSHAKE_S for each of a few bytes. There are never more than
    MAX_STRANGERS of them: the oldest is closed.
    """

    def __init__(self, address: str, secret: bytes):
        self._secret, self._closed = secret, False
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = close_on_fork(socket.create_server((address, 0), family=family, backlog=MAX_STRANGERS))
        self.address, self.port = self._server.getsockname()[:2]
        self.channels: dict[str, BulkChannel] = {}
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="paceline bulk", daemon=True).start()

    def _run(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._server.accept()
            except OSError:  # the server was closed; or too many files are open, which passes
                time.sleep(RETRY_DELAY_S)
            else:
                with self._lock:
                    if len(self._strangers) >= MAX_STRANGERS:
                        oldest = next(iter(self._strangers))
                        del self._strangers[oldest]
                        with contextlib.suppress(OSError):
                            oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
                    self._strangers[close_on_fork(connection)] = None
                threading.Thread(target=self._admit, args=(connection,), name="paceline bulk", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        try:
            name, bulk = self._authenticate(connection)
        except (OSError, ValueError, LinkError):
            connection.close()
        else:
            with self._lock:  # a new connection replaces the one before
                previous = self.channels.get(name)
                if not self._closed:
                    self.channels[name] = bulk
            for old in (previous, bulk if self._closed else None):
                if old is not None:
                    old.close()
        finally:
            with self._lock:
                self._strangers.pop(connection, None)

    def _authenticate(self, connection: socket.socket) -> tuple[str, BulkChannel]:
        connection.settimeout(HANDSHAKE_S)
        nonce = secrets.token_bytes(SIZE)
        connection.sendall(HEADER + nonce)
        header, rank, its_nonce, proof = HELLO.unpack(exactly(connection, HELLO.size))
        nonces = nonce + its_nonce
        if header != HEADER or not same(proof, mac(self._secret, CLIENT, rank, nonces)):
            connection.sendall(REFUSED)
            raise ValueError("it did not authenticate")
        connection.sendall(mac(self._secret, SERVER, rank, nonces))
        bulk = BulkChannel(connection, self._secret, rank, nonces, (DOWN, UP))
        return bulk.receive().decode(), bulk

    def close(self) -> None:
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):  # wakes the thread in accept
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._lock:
            channels = list(self.channels.values())
        for bulk in channels:
            bulk.close()


def connect_bulk(address: str, port: int, secret: bytes, name: str) -> BulkChannel:
    """The joining node's end, under its name. Raises LinkError."""
    try:
        connection = connect(address, port, HANDSHAKE_S)
        with closed_on_error(connection):
            return _handshake(connection, secret, name)
    except OSError as error:
        raise LinkError(f"the node at {address}:{port} that was to send its state has failed ({error})") from error


def _handshake(connection: socket.socket, secret: bytes, name: str) -> BulkChannel:
    connection.settimeout(HANDSHAKE_S)
    header, nonce = exactly(connection, len(HEADER)), secrets.token_bytes(SIZE)
    if header != HEADER:
        raise LinkError("the process there runs another version of paceline; install the same on every node")
    nonces = exactly(connection, SIZE) + nonce
    connection.sendall(HELLO.pack(HEADER, NO_RANK_YET, nonce, mac(secret, CLIENT, NO_RANK_YET, nonces)))
    if not same(exactly(connection, SIZE), mac(secret, SERVER, NO_RANK_YET, nonces)):
        raise LinkError("the node that was to send its state did not prove that it belongs to this run")
    bulk = BulkChannel(connection, secret, NO_RANK_YET, nonces, (UP, DOWN))
    encoded = name.encode()
    bulk.send([encoded], len(encoded))
    return bulk
