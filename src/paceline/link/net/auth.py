"""Authentication: proof of the run's secret, then frames with MACs and sequence numbers.

    server -> guest:  magic, version                  which language
                      nonce
    guest -> server:  magic, version, rank, nonce, proof by the guest
    server -> guest:  proof by the server, or REFUSED
    then each way:    length, body, seal

Proofs and seals are HMAC-SHA256 over the version, the speaker's part, the rank and both nonces; a seal's key is of
this conversation and of one direction, and its frames are counted. Who listens on the wire can read, unless the secret
is an `EncryptionKey` one: then bodies are encrypted, too, by AES-256-GCM with a key and a count of their own kind.
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
HEADER = MAGIC + bytes([VERSION])  # of every version: its place and length never change
SIZE = 32  # bytes of a nonce, a proof, a seal
HELLO = struct.Struct(f"<{len(HEADER)}sH{SIZE}s{SIZE}s")
REFUSED = bytes(SIZE)
MAX_BYTES = 64 * 1024  # of a body
GUEST, SERVER = b"guest", b"server"
TAG = 16  # bytes by which AES-GCM lengthens what it hides


class AuthError(ValueError):
    """What came is not what a member would have sent."""


class EncryptionKey(bytes):
    """A secret in whose conversations bodies are encrypted. Proofs by it are none by the bare one, nor the reverse."""


_taken: list[bytes] = []


def secret_of_environment() -> bytes:
    """PACELINE_SECRET, which a launcher sets. Without it the secret is empty, and anyone may join.

    It is taken out of the environment and kept here: what this process starts from now on does not get it.
    """
    if (secret := os.environ.pop("PACELINE_SECRET", None)) is not None:
        _taken[:] = [secret.encode()]
    return _taken[0] if _taken else b""


def exactly(line: socket.socket, count: int) -> bytes:
    """So many bytes from the peer. Raises ConnectionResetError where it closes the connection before."""
    found = b""
    while len(found) < count:
        if not (received := line.recv(count - len(found))):
            raise ConnectionResetError("it hung up")
        found += received
    return found


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, pack(parts), hashlib.sha256).digest()


def mac(secret: bytes, part: bytes, rank: int, nonces: bytes) -> bytes:
    what = b"proof of a hidden one" if isinstance(secret, EncryptionKey) else b"proof"
    return _mac(secret, HEADER, what, part, struct.pack("<H", rank), nonces)


same = hmac.compare_digest


class MessageAuthenticator:
    """One side of a conversation: wraps what it says, and opens what it hears, each once and in order."""

    def __init__(self, secret: bytes, part: bytes, rank: int, nonces: bytes, most_bytes: int = MAX_BYTES):
        self.most_bytes = most_bytes

        def keys(what: bytes) -> tuple[bytes, bytes]:
            about = struct.pack("<H", rank), nonces
            other = SERVER if part == GUEST else GUEST
            return _mac(secret, HEADER, what, part, *about), _mac(secret, HEADER, what, other, *about)

        self._says, self._hears = keys(b"seal")
        self._hides, self._shows = (StreamCipher(secret, key) for key in keys(b"veil"))
        self._num_said = self._num_heard = 0

    def wrap(self, fields: Sequence[bytes]) -> bytes:
        """Raises ValueError for more than ``most_bytes``."""
        body = self._hides.hide(pack(fields), self._num_said)
        if len(body) > self.most_bytes:
            raise ValueError(f"the other side takes at most {self.most_bytes} bytes at a time, got {len(body)}")
        seal = _mac(self._says, struct.pack("<Q", self._num_said), body)
        self._num_said += 1
        return struct.pack("<I", len(body)) + body + seal

    def take(self, heard: bytearray) -> list[bytes] | None:
        """The fields of the first frame in ``heard``, which is cut off; None until it is whole. Raises Distrust."""
        if len(heard) < 4:
            return None
        (size,) = struct.unpack_from("<I", heard)
        if size > self.most_bytes:
            raise AuthError(f"a frame of {size} bytes")
        if len(heard) < 4 + size + SIZE:
            return None
        body, seal = bytes(heard[4 : 4 + size]), bytes(heard[4 + size : 4 + size + SIZE])
        if not same(seal, _mac(self._hears, struct.pack("<Q", self._num_heard), body)):
            raise AuthError("a frame with a wrong seal")
        fields = unpack(self._shows.show(body, self._num_heard))
        self._num_heard += 1
        del heard[: 4 + size + SIZE]
        return fields


class StreamCipher:
    """Hides what is said under an `EncryptionKey` secret, and nothing under another. ``key``: 32 bytes, of one
    direction of one conversation, in which no number comes twice."""

    def __init__(self, secret: bytes, key: bytes):
        self._cipher: Any = None
        if isinstance(secret, EncryptionKey):
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._cipher = AESGCM(key)

    @property
    def hides(self) -> bool:
        return self._cipher is not None

    def hide(self, words: bytes | memoryview, number: int) -> bytes:
        return bytes(words if self._cipher is None else self._cipher.encrypt(_nonce(number), words, None))

    def show(self, words: bytes | memoryview, number: int) -> bytes:
        """Of what has been proved to be a member's."""
        return bytes(words if self._cipher is None else self._cipher.decrypt(_nonce(number), words, None))


def _nonce(number: int) -> bytes:
    return struct.pack("<QI", number, 0)


def pack(fields: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)


def unpack(body: bytes) -> list[bytes]:
    """Raises Distrust where lengths and body do not fit."""
    fields = []
    while body:
        size = int.from_bytes(body[:4], "little")
        if len(body) < 4 + size:
            raise AuthError("a field that is longer than its frame")
        fields.append(body[4 : 4 + size])
        body = body[4 + size :]
    return fields
