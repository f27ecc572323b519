"""TCP keepalive where gloo sets none: a broken cable between two nodes ends what waits on it.

The pulse sees who is cut off from rank 0. Of two others that are cut off from each other alone, only their own
connections know. A process that stands still, and a slow link, answer the kernel's questions and are left in peace.

Ports that a library leaves open after those have come who should: closed, without the library's noticing.

Gloo listens for as long as its device lives. It keeps every connection that says eight bytes there, takes one for a
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
SILENT_S = 5  # without an answer, or without one to what was sent
ASK_AFTER_S, ASK_EVERY_S, ASK_TIMES = 2, 1, 3
INFO_BYTES = 104  # of struct tcp_info, in which are: segments without an answer, milliseconds since the last one
UNACKED = LAST_ACK = struct.Struct("I")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """The connections made within, by whatever library, end with an error when the other end cannot be reached."""
    before = sockets()
    yield
    if sys.platform != "linux":
        return
    for descriptor, kind in sockets().items():
        if before.get(descriptor) == kind:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
            if line.type == socket.SOCK_STREAM and line.family in (socket.AF_INET, socket.AF_INET6):
                line.getpeername()  # one that listens has none
                watch(line)


def watch(line: socket.socket) -> None:
    """One connection, as those made within `watched`."""
    if sys.platform == "linux":
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_AFTER_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, ASK_TIMES)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)


def sockets() -> dict[int, str]:
    """This process's, by descriptor."""
    found = {}
    with contextlib.suppress(OSError):  # where there is no /proc
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                kind = os.readlink(f"/proc/self/fd/{name}")
                if kind.startswith("socket:"):
                    found[int(name)] = kind
    return found


def addresses() -> list[str]:
    """This machine's own, as others may see them."""
    cards = [one.address for card in psutil.net_if_addrs().values() for one in card if one.family in FAMILIES]
    return [address.partition("%")[0] for address in cards]


def unanswered(among: Collection[str]) -> str:
    """Which of these addresses has not confirmed what this process sent it for SILENT_S, by whatever library; empty if
    none. A script's own connections to elsewhere may break as they like."""
    for descriptor in sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
            if line.type == socket.SOCK_STREAM and line.family in (socket.AF_INET, socket.AF_INET6):
                told = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
                waiting, silent_ms = UNACKED.unpack_from(told, 24)[0], LAST_ACK.unpack_from(told, 56)[0]
                if waiting and told[2] > 1 and silent_ms > 1000 * SILENT_S:  # told[2]: times that it was sent again
                    address = str(line.getpeername()[0]).partition("%")[0].removeprefix("::ffff:")
                    if address in among:
                        return address
    return ""


Result = TypeVar("Result")

_turn = threading.Lock()  # of all threads that open something here: each must know what is its own


@contextlib.contextmanager
def shut_after(address: str, begin: Callable[[], Result]) -> Iterator[Result]:
    """Gives what ``begin()`` returns; where it has begun to listen at ``address``, nobody listens after this."""
    with _turn:
        before = _listening(address)
        begun = begin()
        opened = {number: kind for number, kind in _listening(address).items() if before.get(number) != kind}
    try:
        yield begun
    finally:
        with _turn:
            there = _listening(address)
            for number in [number for number, kind in opened.items() if there.get(number) == kind]:
                _shut(number)


def _listening(address: str) -> dict[int, str]:
    """This process's sockets, by descriptor."""
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
    """In its place one where nobody comes: a library that is just accepting finds nobody there, which is no error."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as nowhere:
        nowhere.bind("")  # a name that the kernel makes up, in no folder
        nowhere.listen(0)
        nowhere.setblocking(False)
        os.dup2(nowhere.fileno(), descriptor, inheritable=False)
