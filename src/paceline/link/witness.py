"""Who has ended for certain: a line to each other process, on which nothing is said for as long as both live.

The kernel hangs up in peace for a process that has ended, however it did. That a connection is refused shows less: a
firewall refuses, too, for one that is alive. It may even break a line; hang up in peace it cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from weakref import finalize

from paceline.contract import LinkError
from paceline.link.meeting import Meeting

HANG_UP_S = 0.5  # after it was seen that nobody listens there any more: files are closed one after the other
CROWD = 32


class Witness:
    """Lines by the names of those to whom they lead, opened by ``reach``. Without one nobody is known to have ended."""

    def __init__(self, reach: Callable[[str], Meeting]):
        self._reach = reach
        self._lines: dict[str, Meeting] = {}
        finalize(self, _close, self._lines)

    def watch(self, names: Iterable[str], other: Witness | None = None) -> None:
        """These and no others; lines of ``other`` to any of them are taken over from it."""
        names = list(names)
        if other:
            self._lines.update(other._lines)
            other._lines.clear()
        for name in self._lines.keys() - set(names):
            self._lines.pop(name).close()
        missing = [name for name in names if name not in self._lines]
        if missing:
            with ThreadPoolExecutor(min(CROWD, len(missing))) as crowd:
                list(crowd.map(self._open, missing))

    def _open(self, name: str) -> None:
        with contextlib.suppress(LinkError):
            line = self._reach(name)
            line.keep()
            self._lines[name] = line

    def ended(self, name: str, limit_s: float = 0.0) -> bool:
        return name in self._lines and self._lines[name].ended(limit_s)


def _close(lines: dict[str, Meeting]) -> None:
    for line in lines.values():
        line.close()
