"""Words over a socket that waits for nobody: a kind and a body, sealed, and hidden where the run hides what it says.

What has not gone or come whole is kept.

Lines that end with this process, though it has forked others: a loader's worker lives for some seconds longer than
a trainer that is killed, and a line that it holds, too, would not end so that anybody learns of the death.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
import termios
from typing import TypeVar
from weakref import WeakSet

from paceline.link.net.auth import MessageAuthenticator

MAX_BYTES = 1 << 20  # of a word
BITE = 1 << 16
ROUND_TRIP = struct.Struct("I")  # tcpi_rtt, in microseconds


class Words:
    """``line`` must be set not to block."""

    def __init__(self, line: socket.socket, seal: MessageAuthenticator):
        self.line, self._seal = alone(line), seal
        self._out, self._in = bytearray(), bytearray()

    def say(self, kind: bytes, body: bytes = b"") -> None:
        self._out += self._seal.wrap([kind, body])
        self.push()

    def push(self) -> None:
        with contextlib.suppress(OSError):
            while self._out:
                del self._out[: self.line.send(self._out)]

    @property
    def stuck(self) -> bool:
        """Whether something has not even left this process."""
        return bool(self._out)

    @property
    def arrived(self) -> bool:
        """Whether the machine at the other end has confirmed all that was said: its kernel does, whatever its process
        is at."""
        left = array.array("i", [0])
        try:
            fcntl.ioctl(self.line, termios.TIOCOUTQ, left)
        except OSError:
            return False
        return not self._out and left[0] == 0

    @property
    def way_s(self) -> float:
        """There and back, as the kernel has measured it; 0: it does not say."""
        with contextlib.suppress(OSError, struct.error):
            return (
                float(ROUND_TRIP.unpack_from(self.line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 68)[0])
                / 1e6
            )
        return 0.0

    def hear(self) -> tuple[list[tuple[bytes, bytes]], bool]:
        """(the words that have come whole, whether more can come). Nonsense ends it."""
        try:
            heard = self.line.recv(BITE)
        except BlockingIOError:
            return [], True
        except OSError:
            heard = b""
        self._in += heard
        found: list[tuple[bytes, bytes]] = []
        try:
            while word := self._seal.take(self._in):
                kind, body = word
                found.append((kind, body))
        except ValueError:  # Distrust is one
            return found, False
        return found, bool(heard)


Line = TypeVar("Line", bound=socket.socket)

_lines: WeakSet[socket.socket] = WeakSet()


def alone(line: Line) -> Line:
    """The same line, which a forked child gives up at once."""
    _lines.add(line)
    return line


def _give_up() -> None:
    for line in list(_lines):
        with contextlib.suppress(OSError):
            line.close()


os.register_at_fork(after_in_child=_give_up)
