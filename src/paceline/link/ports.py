"""Ports that a library leaves open after those have come who should: closed, without the library's noticing.

Gloo listens for as long as its device lives. It keeps every connection that says eight bytes there, takes one for a
peer's if they are the right eight, and ends the process when it has no descriptors left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from paceline.link.cable import sockets

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
