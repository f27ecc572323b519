"""The logger `paceline`: on stderr, unless the script has configured a handler of its own for it.

PACELINE_LOG is the lowest level that is printed. A handler that the user adds to this logger replaces ours.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from paceline.environment import log_level

log = logging.getLogger("paceline")


class _Screen(logging.Handler):
    """Prints on the current `sys.stderr`, unless another handler takes the record."""

    def emit(self, record: logging.LogRecord) -> None:
        handlers = (*log.handlers, *(logging.root.handlers if log.propagate else ()))
        if sys.stderr is None or any(handler is not self and not _captures(handler) for handler in handlers):
            return
        text = f"{self.format(record)}\n"
        with contextlib.suppress(OSError, ValueError):  # a full disk or a closed stream must not end a run
            sys.stderr.write(text)  # in one call: other processes write to the same terminal
            sys.stderr.flush()


def _captures(handler: logging.Handler) -> bool:
    """pytest's caplog adds itself to this logger (since 9.2) but prints nothing; tests with capsys need our lines."""
    return type(handler).__module__.startswith("_pytest.")


_screen = _Screen()
_screen.setFormatter(logging.Formatter("paceline: %(message)s"))
# A child that was forked during a write would wait forever for the stream's lock. `logging` renews the handler's own
# lock in the child.
os.register_at_fork(before=_screen.acquire, after_in_parent=_screen.release)


def configure() -> None:
    """Called at import, and at the start of a run or a command. Raises ValueError for an invalid PACELINE_LOG."""
    log.disabled = False  # logging.config disables existing loggers, but a run must not end without a message
    if not log.handlers:
        log.addHandler(_screen)
    _screen.setLevel(log_level())


if not log.level:
    log.setLevel(logging.DEBUG)  # each handler has its own level
if not log.handlers:
    # A message must not be printed again by a handler of the root logger (logging.basicConfig, pytest's caplog). Where
    # a script sets this to true, the root's handlers print instead.
    log.propagate = False
_screen.setLevel(logging.INFO)
with contextlib.suppress(ValueError):  # raised again by the first run or command
    configure()
