"""Lines that end with this process, though it has forked others: a loader's worker lives for some seconds longer than
a trainer that is killed, and a line that it holds, too, would not end so that anybody learns of the death."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TypeVar
from weakref import WeakSet

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
