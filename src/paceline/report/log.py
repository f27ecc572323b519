"""The logger `paceline`: on stderr, unless the script has configured a handler of its own for it.

PACELINE_LOG is the level from which on it is printed. A handler of the user's on this logger takes the place of ours.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from paceline.environment import log_level

log = logging.getLogger("paceline")


class _Screen(logging.Handler):
    """On stderr as it is at that moment, as long as nobody else handles the record."""

    def emit(self, record: logging.LogRecord) -> None:
        handlers = (*log.handlers, *(logging.root.handlers if log.propagate else ()))
        if sys.stderr is None or any(each is not self and not _captures(each) for each in handlers):
            return
        text = f"{self.format(record)}\n"
        with contextlib.suppress(OSError, ValueError):  # a full disk or a closed stream is no reason to end a run
            sys.stderr.write(text)  # in one piece: others write to the same terminal
            sys.stderr.flush()


def _captures(handler: logging.Handler) -> bool:
    """pytest's caplog adds itself to this logger (since 9.2), and prints nothing: tests with capsys see our lines."""
    return type(handler).__module__.startswith("_pytest.")


_screen = _Screen()
_screen.setFormatter(logging.Formatter("paceline: %(message)s"))
# A child that was forked in the middle of a write would wait for ever for the stream's lock. Its own handler's lock is
# made anew by `logging`.
os.register_at_fork(before=_screen.acquire, after_in_parent=_screen.release)


def configure() -> None:
    """At the start of a run or a command, and once before. Raises ValueError for a wrong PACELINE_LOG."""
    log.disabled = False  # logging.config disables what exists, and a run must not end without a word
    if not log.handlers:
        log.addHandler(_screen)
    _screen.setLevel(log_level())


if not log.level:
    log.setLevel(logging.DEBUG)  # each handler has its own level
if not log.handlers:
    # What is printed here must not be printed again by a handler of the root logger (logging.basicConfig, pytest's
    # caplog). Where a script sets it to true, the root's handlers print instead.
    log.propagate = False
_screen.setLevel(logging.INFO)
with contextlib.suppress(ValueError):  # told by the first who calls it
    configure()
