"""Ports that a library leaves open after those have come who should: closed, without the library's noticing.

Gloo listens for as long as its device lives. It keeps every connection that says eight bytes there, takes one for a
peer's if they are the right eight, and ends the process when it has no descriptors left.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

from paceline.link.cable import sockets


@contextlib.contextmanager
def shut_after(address: str) -> Iterator[Callable[[], None]]:
    """To be called within, as soon as the library listens at ``address``: what it has opened so far, ends with this."""
    before, opened = _listening(address), set[int]()
    try:
        yield lambda: opened.update(_listening(address) - before)
    finally:
        for descriptor in opened:
            _shut(descriptor)


def _listening(address: str) -> set[int]:
    """This process's descriptors."""
    found = set()
    for descriptor in sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
            if line.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            here = line.family == socket.AF_INET6 or line.getsockname()[0] == address  # IPv6 has many spellings
            if here and line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(descriptor)
    return found


def _shut(descriptor: int) -> None:
    """In its place one where nobody comes: a library that is just accepting finds nobody there, which is no error."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as nowhere:
        nowhere.bind("")  # a name that the kernel makes up, in no folder
        nowhere.listen(0)
        nowhere.setblocking(False)
        os.dup2(nowhere.fileno(), descriptor, inheritable=False)
