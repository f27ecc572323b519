"""Status file that a process writes for its launcher: JSON, one per process id, in the folder PACELINE_STATUS.

joined   the process has joined the run; a joining node's: it was admitted and has all state
step     number of steps done when it ended
error    the exception that ended it; ``link``: true if it ended because other processes failed
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "PACELINE_STATUS"
MAX_CHARACTERS = 500  # characters of an error

_reported: dict[str, Any] = {}


def report(**values: Any) -> None:
    """Adds ``values`` to those reported before, and replaces the status file atomically."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    _reported.update(values)
    path = Path(folder) / f"{os.getpid()}.json"
    with contextlib.suppress(OSError):  # on a full disk the launcher uses the exit code alone
        part = path.with_suffix(".part")
        part.write_text(json.dumps(_reported))
        part.replace(path)


def failed(error: BaseException, step: int, link: bool) -> None:
    report(error=f"{type(error).__name__}: {error}"[:MAX_CHARACTERS], step=step, link=link)


def read(folder: Path, pid: int) -> dict[str, Any]:
    """What a process reported; empty if it reported nothing."""
    try:
        status = json.loads((folder / f"{pid}.json").read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}
