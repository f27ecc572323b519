"""The event log: one JSON line per event, with its time, in a file that any tool can follow.

Lines are complete or absent: one write for each, by one thread at a time. A line that a full disk or a killed run left
incomplete is removed before the next line. docs/record.md names the events and their fields.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.report.log import log

NAME = "record.jsonl"
TAIL_BYTES = 1 << 16


class Record:
    """Appends to ``folder/record.jsonl``; without a folder, nothing is written.

    Any thread may write. A full disk is reported once on stderr; training continues, and events are lost meanwhile.
    """

    def __init__(self, folder: Path | None = None):
        self.folder: Path | None = None
        self._lock = threading.Lock()
        self._file: int | None = None
        self._reported = False
        if folder:
            self.open(folder)

    def open(self, folder: Path) -> None:
        """Opens the file in ``folder``, to which events are appended from then on."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._cut_torn_line()

    def write(self, event: str, **fields: Any) -> None:
        if self._file is None:
            return
        line = json.dumps({"event": event, "time": round(time.time(), 3), **_plain(fields)}, default=str)
        with self._lock:
            if self._file is not None:
                self._append(self._file, line.encode() + b"\n")

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _append(self, file: int, line: bytes) -> None:
        before = None
        try:
            before = os.fstat(file).st_size
            if os.write(file, line) < len(line):
                os.ftruncate(file, before)
                raise OSError("only a part of a line could be written")
        except OSError as error:
            if not self._reported:
                self._reported = True
                log.warning(
                    f"{self.folder}/{NAME} cannot be written ({error.strerror or error}); training continues, events "
                    f"are missing from the record until it can"
                )

    def _cut_torn_line(self) -> None:
        """Removes a last line without newline, which a killed run left; it would corrupt the first line of this run."""
        assert self._file is not None
        size = end = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - TAIL_BYTES)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            end = start + found + 1 if found >= 0 else start
            if found >= 0:
                break
        if end < size:
            os.ftruncate(self._file, end)


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become strings. Floats are rounded to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of a run, one by one. An incomplete last line is left out.

    *Raises* ValueError for a folder without a record, a record without an event, or a broken line.
    """
    path = folder / NAME
    if not folder.is_dir():
        raise ValueError(f"no run at {folder}: there is no such folder; give the folder that training named as its run")
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no {NAME}, so it is not a run; give the folder that training named as its run"
        )
    count = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                count += 1
                yield parse(line, f"{path}, line {count}")
    if count == 0:
        raise ValueError(f"{path} is empty: the run ended before its first event; train again, or give another run")


def parse(line: bytes, where: str) -> dict[str, Any]:
    """The event of one complete line. Raises ValueError, which names ``where``."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        event = json.loads(line)
        if isinstance(event, dict) and isinstance(event["event"], str) and math.isfinite(event["time"]):
            return event
    raise ValueError(
        f"{where} is not an event: got {line[:60]!r}; a line is a JSON object with 'event' and 'time'. Delete that "
        f"line, or restore the file"
    )


def write_whole(path: Path, text: str) -> None:
    """Writes the file atomically, also where several processes write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(folder: Path) -> list[dict[str, Any]]:
    """All events of a run, as a list. Raises as `events` does."""
    return list(events(folder))
