"""Messages over a non-blocking socket: a kind and a body, authenticated, and encrypted in an encrypted run.

Incomplete messages are buffered. Forked children close their copies of these sockets: a data loader's worker outlives a
killed trainer by seconds, and while it held a copy, the peer would not see the connection close.
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
RECV_BYTES = 1 << 16
ROUND_TRIP = struct.Struct("I")  # tcpi_rtt, in microseconds


class MessageSocket:
    """``line`` must be non-blocking."""

    def __init__(self, line: socket.socket, seal: MessageAuthenticator):
        self.line, self._seal = close_on_fork(line), seal
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
        """Whether part of a message is still in this process's buffer."""
        return bool(self._out)

    @property
    def arrived(self) -> bool:
        """Whether the peer's kernel has acknowledged all that was sent, whatever its process is doing."""
        unacknowledged = array.array("i", [0])
        try:
            fcntl.ioctl(self.line, termios.TIOCOUTQ, unacknowledged)
        except OSError:
            return False
        return not self._out and unacknowledged[0] == 0

    @property
    def way_s(self) -> float:
        """The round-trip time that the kernel has measured; 0 where it reports none."""
        with contextlib.suppress(OSError, struct.error):
            info = self.line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            return float(ROUND_TRIP.unpack_from(info, 68)[0]) / 1e6
        return 0.0

    def receive(self) -> tuple[list[tuple[bytes, bytes]], bool]:
        """(the complete messages, whether more can arrive): none can after one that does not authenticate."""
        try:
            received = self.line.recv(RECV_BYTES)
        except BlockingIOError:
            return [], True
        except OSError:
            received = b""
        self._in += received
        messages: list[tuple[bytes, bytes]] = []
        try:
            while fields := self._seal.take(self._in):
                kind, body = fields
                messages.append((kind, body))
        except ValueError:  # or AuthError, its subclass
            return messages, False
        return messages, bool(received)


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


def close_on_fork(line: Line) -> Line:
    """Returns the same socket; a forked child closes its copy at once."""
    _lines.add(line)
    return line


def _close_all() -> None:
    for line in list(_lines):
        with contextlib.suppress(OSError):
            line.close()


os.register_at_fork(after_in_child=_close_all)
