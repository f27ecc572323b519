"""Messages over a non-blocking socket: a kind and a body, authenticated, and encrypted where the run is.

What has not been sent or received whole is kept. Sockets are closed in forked children: a loader's worker outlives a
killed trainer by seconds, and a socket that it holds, too, would not end for the peer to notice.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from typing import Protocol, TypeVar
from weakref import WeakSet

from paceline.link.net.auth import MessageAuthenticator

MAX_BYTES = 1 << 20  # of a message
BITE = 1 << 16
ROUND_TRIP = struct.Struct("I")  # tcpi_rtt, in microseconds


class MessageSocket:
    """``line`` must be set not to block."""

    def __init__(self, line: socket.socket, seal: MessageAuthenticator):
        self.line, self._seal = alone(line), seal
        self._out, self._in = bytearray(), bytearray()

    def send(self, kind: bytes, body: bytes = b"") -> None:
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
        """Whether the peer's kernel has confirmed all that was sent, whatever its process is doing."""
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
            info = self.line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            return float(ROUND_TRIP.unpack_from(info, 68)[0]) / 1e6
        return 0.0

    def receive(self) -> tuple[list[tuple[bytes, bytes]], bool]:
        """(the messages that have come whole, whether more can come). Nonsense ends it."""
        try:
            received = self.line.recv(BITE)
        except BlockingIOError:
            return [], True
        except OSError:
            received = b""
        self._in += received
        found: list[tuple[bytes, bytes]] = []
        try:
            while fields := self._seal.take(self._in):
                kind, body = fields
                found.append((kind, body))
        except ValueError:  # Distrust is one
            return found, False
        return found, bool(received)


@contextlib.contextmanager
def closed_on_error(thing: Closable) -> Iterator[None]:
    try:
        yield
    except BaseException:
        thing.close()
        raise


class Closable(Protocol):
    def close(self) -> None: ...


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
