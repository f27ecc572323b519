"""A host that does not belong: it says to every open port what it should not, and what it has heard others say."""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.link.proof import HEADER

LISTENS, UNCONNECTED = "0A", "07"  # in /proc/net/tcp and /proc/net/udp
CLONE_NEWNET = 0x40000000
HELD = 40  # connections that are left open
SAY_S = 1.0
GREETING = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a TLS client begins

Door = tuple[str, int]

_libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace: str) -> None:
    """From now on the sockets of this thread are those of another machine. Raises OSError."""
    with open(f"/run/netns/{namespace}", "rb") as place:
        if _libc.setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no way into {namespace}")


def doors(process: int) -> set[Door]:
    """Where anything listens on the machine of that process, but for its loopback."""
    found = set()
    for kind, state in (("tcp", LISTENS), ("tcp6", LISTENS), ("udp", UNCONNECTED), ("udp6", UNCONNECTED)):
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{process}/net/{kind}").read_text().splitlines()[1:]:
                _, place, _, seen, *_ = line.split()
                if seen == state:
                    address, port = place.split(":")
                    found.add((_address(address), int(port, 16)))
    return {door for door in found if not door[0].startswith("127.") and door[0] != "::1"}


def _address(words: str) -> str:
    """Of what /proc writes: whole words of 32 bits, as they lie in memory."""
    numbers = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET6 if len(numbers) > 4 else socket.AF_INET, numbers)


class Stranger:
    """``heard()``: what others have said so far. ``sent``: messages that got through to an open port."""

    def __init__(self, seed: int, heard: Callable[[], Sequence[bytes]]):
        self._dice, self._heard, self.sent = random.Random(seed), heard, 0
        self._held: list[socket.socket] = []

    def say(self, open_doors: Sequence[Door]) -> None:
        """One message to one of them, over a connection that is closed at once, later or in the middle."""
        try:
            line = socket.create_connection(self._dice.choice(open_doors), SAY_S)
        except OSError:
            return
        self._held.append(line)
        with contextlib.suppress(OSError):
            if words := self._words():
                line.sendall(words)
        self.sent += 1
        if len(self._held) > HELD or self._dice.random() < 0.5:
            self._held.pop(self._dice.randrange(len(self._held))).close()

    def _words(self) -> bytes:
        dice, heard = self._dice, self._heard()
        recorded = dice.choice(heard) if heard else HEADER
        noise = dice.randbytes(int(10 ** dice.uniform(0, 3.5)))
        spoilt = bytearray(recorded)
        spoilt[dice.randrange(len(spoilt))] ^= 1 << dice.randrange(8)
        return dice.choice(
            (
                b"",
                noise,
                HEADER + noise,
                GREETING + noise,
                bytes(8),  # gloo takes whoever begins with a number that it waits for
                dice.randrange(64).to_bytes(8, "little") + noise,
                b"\xff" * 8,
                recorded,
                recorded,
                bytes(spoilt),
                recorded[: dice.randrange(len(recorded)) + 1],
            )
        )

    def close(self) -> None:
        for line in self._held:
            line.close()


def disturb(
    stranger: Stranger, find: Callable[[], set[Door]], count: int, seconds: float, over: Callable[[], bool]
) -> set[Door]:
    """``count`` messages, spread over that time, to whatever is open: looked for every second. Returns the doors."""
    begin, known, looked = time.monotonic(), set[Door](), 0.0
    open_doors: list[Door] = []
    try:
        while stranger.sent < count and not over():
            now = time.monotonic() - begin
            if not open_doors or now - looked > 1.0:
                open_doors, looked = sorted(find()), now
                known.update(open_doors)
            if open_doors and now >= seconds * stranger.sent / count:
                stranger.say(open_doors)
            else:
                time.sleep(0.002)
    finally:
        stranger.close()
    return known
