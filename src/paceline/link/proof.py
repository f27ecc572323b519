"""Proof of the run's secret, and what is said after it: frames that nobody else can make, change or say again.

    server -> guest:  magic, version                  which language
                      nonce
    guest -> server:  magic, version, rank, nonce, proof by the guest
    server -> guest:  proof by the server, or REFUSED
    then each way:    length, body, seal

Proofs and seals are HMAC-SHA256 over the version, the speaker's part, the rank and both nonces; a seal's key is of
this conversation and of one direction, and its frames are counted. Nothing is hidden: who listens on the wire can read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Sequence

VERSION = 1
MAGIC = b"paceline"
HEADER = MAGIC + bytes([VERSION])  # of every version: its place and length never change
SIZE = 32  # bytes of a nonce, a proof, a seal
HELLO = struct.Struct(f"<{len(HEADER)}sH{SIZE}s{SIZE}s")
REFUSED = bytes(SIZE)
MAX_BYTES = 64 * 1024  # of a body
GUEST, SERVER = b"guest", b"server"


class Distrust(ValueError):
    """What came is not what a member would have sent."""


def secret_of_environment() -> bytes:
    """PACELINE_SECRET, which a launcher sets. Without it the secret is empty, and anyone may join."""
    return os.environ.get("PACELINE_SECRET", "").encode()


def exactly(line: socket.socket, count: int) -> bytes:
    """So many bytes of what the other side says. Raises ConnectionResetError where it hangs up before."""
    found = b""
    while len(found) < count:
        words = line.recv(count - len(found))
        if not words:
            raise ConnectionResetError("it hung up")
        found += words
    return found


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, pack(parts), hashlib.sha256).digest()


def prove(secret: bytes, part: bytes, rank: int, nonces: bytes) -> bytes:
    return _mac(secret, HEADER, b"proof", part, struct.pack("<H", rank), nonces)


def same(proof: bytes, other: bytes) -> bool:
    return hmac.compare_digest(proof, other)


class Seal:
    """One side of a conversation: wraps what it says, and opens what it hears, each once and in order."""

    def __init__(self, secret: bytes, part: bytes, rank: int, nonces: bytes):
        def key(speaker: bytes) -> bytes:
            return _mac(secret, HEADER, b"seal", speaker, struct.pack("<H", rank), nonces)

        self._says, self._hears = key(part), key(SERVER if part == GUEST else GUEST)
        self._num_said = self._num_heard = 0

    def wrap(self, fields: Sequence[bytes]) -> bytes:
        """Raises ValueError for more than MAX_BYTES."""
        body = pack(fields)
        if len(body) > MAX_BYTES:
            raise ValueError(f"the meeting point takes at most {MAX_BYTES} bytes at a time, got {len(body)}")
        seal = _mac(self._says, struct.pack("<Q", self._num_said), body)
        self._num_said += 1
        return struct.pack("<I", len(body)) + body + seal

    def take(self, heard: bytearray) -> list[bytes] | None:
        """The fields of the first frame in ``heard``, which is cut off; None until it is whole. Raises Distrust."""
        if len(heard) < 4:
            return None
        (size,) = struct.unpack_from("<I", heard)
        if size > MAX_BYTES:
            raise Distrust(f"a frame of {size} bytes")
        if len(heard) < 4 + size + SIZE:
            return None
        body, seal = bytes(heard[4 : 4 + size]), bytes(heard[4 + size : 4 + size + SIZE])
        if not same(seal, _mac(self._hears, struct.pack("<Q", self._num_heard), body)):
            raise Distrust("a frame with a wrong seal")
        self._num_heard += 1
        del heard[: 4 + size + SIZE]
        return unpack(body)


def pack(fields: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)


def unpack(body: bytes) -> list[bytes]:
    """Raises Distrust where lengths and body do not fit."""
    fields = []
    while body:
        size = int.from_bytes(body[:4], "little")
        if len(body) < 4 + size:
            raise Distrust("a field that is longer than its frame")
        fields.append(body[4 : 4 + size])
        body = body[4 + size :]
    return fields
