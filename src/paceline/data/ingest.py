"""Journal of a long job: one JSON line for each finished part, so that an interrupted job resumes where it was.

One process at a time holds a journal; others wait for it. An incomplete line of a killed process is dropped. A journal
of another job is started anew.

Also `in_order`: a function applied to many items by threads, with results in order and a bounded number ahead.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar


class Journal:
    """``done``: the lines so far. ``job``: a digest of all inputs on which the lines depend."""

    def __init__(self, path: Path, job: str):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        while True:
            self._file = path.open("a+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logging.getLogger("paceline").info(
                    f"another process does the same work, {path} is its journal: waiting until it ends"
                )
                fcntl.flock(self._file, fcntl.LOCK_EX)  # of a process that lives: it ends with it
            # the previous holder may have removed the file: then this handle is of the removed file
            if path.exists() and os.path.samestat(os.fstat(self._file.fileno()), path.stat()):
                break
            self._file.close()
        self._file.seek(0)
        self.done: list[dict[str, Any]] = []
        num_bytes = 0
        for line in self._file.readlines():
            entry = _parsed(line)
            if entry is None or (not self.done and entry != {"job": job}):
                break
            num_bytes += len(line)
            self.done.append(entry)
        self._file.truncate(num_bytes)
        if not self.done:
            self.write(job=job)
        del self.done[:1]

    def write(self, **entry: Any) -> None:
        """Appends an entry and syncs it to the disk."""
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.append(entry)

    def remove(self) -> None:
        self.path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None


Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """At most four results per thread wait to be taken; closing the iterator early cancels the items not begun."""
    pool = ThreadPoolExecutor(threads, "paceline data")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 4 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
