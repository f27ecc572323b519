"""Authentication: proof of the run's secret, then frames with MACs and sequence numbers.

    server -> client:  magic, version                  of the protocol
                       nonce
    client -> server:  magic, version, rank, nonce, proof by the client
    server -> client:  proof by the server, or REFUSED
    then each way:     length, body, MAC

Proofs are HMAC-SHA256 with the secret over the version, the sender's role, the rank and both nonces. Each direction of
each connection derives its own MAC key; a frame's MAC covers its sequence number. An eavesdropper can read the bodies,
unless the secret is an `EncryptionKey`: then AES-256-GCM encrypts them, with another key and the same numbers.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

VERSION = 1
MAGIC = b"paceline"
HEADER = MAGIC + bytes([VERSION])  # its place and length are the same in every version
SIZE = 32  # bytes of a nonce, a proof, a MAC
HELLO = struct.Struct(f"<{len(HEADER)}sH{SIZE}s{SIZE}s")
REFUSED = bytes(SIZE)
MAX_BYTES = 64 * 1024  # of a body
CLIENT, SERVER = b"guest", b"server"
TAG = 16  # bytes that AES-GCM appends


class AuthError(ValueError):
    """The peer sent something that no member sends."""


class EncryptionKey(bytes):
    """A secret of an encrypted run. Proofs made with it do not match those made with the same bytes unencrypted."""


_taken: list[bytes] = []


def secret_of_environment() -> bytes:
    """PACELINE_SECRET, which a launcher sets. Without it the secret is empty, and any process may join.

    It is removed from the environment and kept here: processes started from now on do not inherit it.
    """
    if (secret := os.environ.pop("PACELINE_SECRET", None)) is not None:
        _taken[:] = [secret.encode()]
    return _taken[0] if _taken else b""


def exactly(line: socket.socket, count: int) -> bytes:
    """``count`` bytes from the peer. Raises ConnectionResetError where it closes the connection before."""
    found = b""
    while len(found) < count:
        if not (received := line.recv(count - len(found))):
            raise ConnectionResetError("it closed the connection")
        found += received
    return found


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, pack(parts), hashlib.sha256).digest()


def mac(secret: bytes, role: bytes, rank: int, nonces: bytes) -> bytes:
    purpose = b"proof of a hidden one" if isinstance(secret, EncryptionKey) else b"proof"
    return _mac(secret, HEADER, purpose, role, struct.pack("<H", rank), nonces)


same = hmac.compare_digest


class MessageAuthenticator:
    """One end of a connection: adds MACs to sent frames and verifies received ones, each once and in order."""

    def __init__(self, secret: bytes, role: bytes, rank: int, nonces: bytes, max_bytes: int = MAX_BYTES):
        self.max_bytes = max_bytes

        def keys(purpose: bytes) -> tuple[bytes, bytes]:
            connection = struct.pack("<H", rank), nonces
            other = SERVER if role == CLIENT else CLIENT
            return _mac(secret, HEADER, purpose, role, *connection), _mac(secret, HEADER, purpose, other, *connection)

        self._send_key, self._receive_key = keys(b"seal")
        self._send_cipher, self._receive_cipher = (StreamCipher(secret, key) for key in keys(b"veil"))
        self._num_sent = self._num_received = 0

    def wrap(self, fields: Sequence[bytes]) -> bytes:
        """Raises ValueError for more than ``max_bytes``."""
        body = self._send_cipher.encrypt(pack(fields), self._num_sent)
        if len(body) > self.max_bytes:
            raise ValueError(f"the other side takes at most {self.max_bytes} bytes at a time, got {len(body)}")
        tag = _mac(self._send_key, struct.pack("<Q", self._num_sent), body)
        self._num_sent += 1
        return struct.pack("<I", len(body)) + body + tag

    def take(self, received: bytearray) -> list[bytes] | None:
        """Removes the first frame from ``received``; its fields, or None until it is whole. Raises AuthError."""
        if len(received) < 4:
            return None
        (size,) = struct.unpack_from("<I", received)
        if size > self.max_bytes:
            raise AuthError(f"a frame of {size} bytes")
        if len(received) < 4 + size + SIZE:
            return None
        body, tag = bytes(received[4 : 4 + size]), bytes(received[4 + size : 4 + size + SIZE])
        if not same(tag, _mac(self._receive_key, struct.pack("<Q", self._num_received), body)):
            raise AuthError("a frame with a wrong MAC")
        fields = unpack(self._receive_cipher.decrypt(body, self._num_received))
        self._num_received += 1
        del received[: 4 + size + SIZE]
        return fields


class StreamCipher:
    """Encrypts where the secret is an `EncryptionKey`; else returns the bytes as they are. ``key``: 32 bytes, of one
    direction of one connection; no message number may be used twice with it."""

    def __init__(self, secret: bytes, key: bytes):
        self._cipher: Any = None
        if isinstance(secret, EncryptionKey):
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._cipher = AESGCM(key)

    @property
    def hides(self) -> bool:
        return self._cipher is not None

    def encrypt(self, message: bytes | memoryview, number: int) -> bytes:
        return bytes(message if self._cipher is None else self._cipher.encrypt(_nonce(number), message, None))

    def decrypt(self, message: bytes | memoryview, number: int) -> bytes:
        """The MAC of ``message`` must have been verified."""
        return bytes(message if self._cipher is None else self._cipher.decrypt(_nonce(number), message, None))


def _nonce(number: int) -> bytes:
    return struct.pack("<QI", number, 0)


def pack(fields: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)


def unpack(body: bytes) -> list[bytes]:
    """Raises AuthError where lengths and body do not fit."""
    fields = []
    while body:
        size = int.from_bytes(body[:4], "little")
        if len(body) < 4 + size:
            raise AuthError("a field that is longer than its frame")
        fields.append(body[4 : 4 + size])
        body = body[4 + size :]
    return fields
