"""TCP keepalive where gloo sets none: operations on a broken connection between two nodes end with an error.

The heartbeat detects a node that is cut off from rank 0. Two other nodes that are cut off only from each other show it
on their own connections alone. A suspended process still answers keepalive probes, and so does a slow link: both stay
connected.

Closing ports that a library leaves open after all peers have connected, without the library's noticing:
Gloo listens for as long as its device lives. It keeps every connection that sends eight bytes there, takes it for a
peer's if they are the right eight, and ends the process when it has no descriptors left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import psutil

FAMILIES = (socket.AF_INET, socket.AF_INET6)
SILENT_S = 5  # without an acknowledgement, of a probe or of data
PROBE_AFTER_S, PROBE_EVERY_S, NUM_PROBES = 2, 1, 3
INFO_BYTES = 104  # of struct tcp_info: with unacknowledged segments, and milliseconds since the last acknowledgement
UNACKED = LAST_ACK = struct.Struct("I")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Turns on keepalive for all TCP connections made within: they end with an error when the peer is unreachable."""
    before = sockets()
    yield
    if sys.platform != "linux":
        return
    for descriptor, kind in sockets().items():
        if before.get(descriptor) == kind:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
            if line.type == socket.SOCK_STREAM and line.family in (socket.AF_INET, socket.AF_INET6):
                line.getpeername()  # raises for a listening socket
                watch(line)


def watch(line: socket.socket) -> None:
    """Turns on keepalive for one connection."""
    if sys.platform == "linux":
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)


def sockets() -> dict[int, str]:
    """This process's sockets: the inode by descriptor."""
    found = {}
    with contextlib.suppress(OSError):  # without /proc
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                kind = os.readlink(f"/proc/self/fd/{name}")
                if kind.startswith("socket:"):
                    found[int(name)] = kind
    return found


def addresses() -> list[str]:
    """This machine's addresses."""
    cards = [one.address for card in psutil.net_if_addrs().values() for one in card if one.family in FAMILIES]
    return [address.partition("%")[0] for address in cards]


def unanswered(among: Collection[str]) -> str:
    """The first of these addresses that has not acknowledged data of this process for SILENT_S, on any connection;
    empty if none. Connections to other addresses, such as a script's own, do not matter."""
    for descriptor in sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
            if line.type == socket.SOCK_STREAM and line.family in (socket.AF_INET, socket.AF_INET6):
                info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
                waiting, silent_ms = UNACKED.unpack_from(info, 24)[0], LAST_ACK.unpack_from(info, 56)[0]
                if waiting and info[2] > 1 and silent_ms > 1000 * SILENT_S:  # info[2]: retransmissions
                    address = str(line.getpeername()[0]).partition("%")[0].removeprefix("::ffff:")
                    if address in among:
                        return address
    return ""


Result = TypeVar("Result")

_opening = threading.Lock()  # only one thread at a time opens sockets here: each must know which are its own


@contextlib.contextmanager
def shut_after(address: str, begin: Callable[[], Result]) -> Iterator[Result]:
    """Yields what ``begin()`` returns; afterwards shuts the sockets that it opened to listen at ``address``."""
    with _opening:
        before = _listening(address)
        begun = begin()
        opened = {number: kind for number, kind in _listening(address).items() if before.get(number) != kind}
    try:
        yield begun
    finally:
        with _opening:
            there = _listening(address)
            for number in [number for number, kind in opened.items() if there.get(number) == kind]:
                _shut(number)


def _listening(address: str) -> dict[int, str]:
    """This process's listening sockets at ``address``: the inode by descriptor."""
    found = {}
    for descriptor, kind in sockets().items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
            if line.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            here = line.family == socket.AF_INET6 or line.getsockname()[0] == address  # IPv6 has many spellings
            if here and line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[descriptor] = kind
    return found


def _shut(descriptor: int) -> None:
    """Replaces it by a socket to which no process connects: an accept in the library then finds none, without error."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unused:
        unused.bind("")  # an abstract name chosen by the kernel, in no folder
        unused.listen(0)
        unused.setblocking(False)
        os.dup2(unused.fileno(), descriptor, inheritable=False)
