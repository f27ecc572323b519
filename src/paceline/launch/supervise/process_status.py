"""What a process reports to its launcher: a small file in the folder that PACELINE_STATUS names, one per process id.

joined   it has joined; a joining node: it was admitted, and has all state
step     how many steps were done when it ended
error    what ended it; ``link``: because others were lost
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "PACELINE_STATUS"
MAX_CHARACTERS = 500  # characters of an error

_said: dict[str, Any] = {}


def report(**facts: Any) -> None:
    """Adds to what was reported before; written whole or not at all."""
    if not (folder := os.environ.get(VARIABLE)):
        return
    _said.update(facts)
    path = Path(folder) / f"{os.getpid()}.json"
    with contextlib.suppress(OSError):  # a full disk; the launcher then judges by the exit code
        part = path.with_suffix(".part")
        part.write_text(json.dumps(_said))
        part.replace(path)


def failed(error: BaseException, step: int, link: bool) -> None:
    report(error=f"{type(error).__name__}: {error}"[:MAX_CHARACTERS], step=step, link=link)


def read(folder: Path, pid: int) -> dict[str, Any]:
    """Empty where nothing was reported."""
    try:
        said = json.loads((folder / f"{pid}.json").read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
