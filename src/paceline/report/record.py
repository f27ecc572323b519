"""One JSON line per event: what happened, when, in a file that any tool can follow."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any


class Record:
    """Appends to ``folder/record.jsonl``; without a folder, nothing is written."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder
        self._file = None
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / "record.jsonl").open("a", buffering=1)

    def write(self, event: str, **fields: Any) -> None:
        if self._file:
            plain = {key: _plain(value) for key, value in fields.items()}
            self._file.write(json.dumps({"event": event, "time": round(time.time(), 3), **plain}) + "\n")

    def close(self) -> None:
        if self._file:
            self._file.close()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def read(folder: Path) -> list[dict[str, Any]]:
    """All events of a run."""
    with (folder / "record.jsonl").open() as file:
        return [json.loads(line) for line in file]
