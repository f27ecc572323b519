"""What a process computed, and when: lines that whoever kills it cannot take back.

    {"began": true}                                      before it joins
    {"tried": step, "generation": g, "rows": [...]}      before its gradient leaves
    {"applied": step, "generation": g, "loss": x, "mark": crc32 of its weights or 0, "nodes": n}
    {"ended": step}

Times are of the monotonic clock, which all namespaces of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Journal:
    """``launch``: how often the training had been started before; the rest of the file's name says who writes."""

    def __init__(self, folder: Path, launch: int, node: str, local_rank: int):
        path = folder / f"{launch}.{node}.{local_rank}.{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.step = self.generation = 0
        self.note(began=True)

    def note(self, **facts: Any) -> None:
        line = {"t": time.monotonic(), "generation": self.generation, **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")


@dataclass(frozen=True)
class Applied:
    t: float
    generation: int
    loss: float
    mark: int
    nodes: int


@dataclass
class Life:
    """One process, as its journal tells it so far."""

    path: Path
    tried: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (step, generation) -> rows
    last: dict[int, int] = field(default_factory=dict)  # step -> the generation in which it was computed last
    applied: dict[int, Applied] = field(default_factory=dict)
    ended: bool = False
    began_s: float = 0.0
    _read: int = 0

    @property
    def launch(self) -> int:
        return int(self.path.name.split(".")[0])

    @property
    def node(self) -> int:
        return int(self.path.name.split(".")[1].removeprefix("node"))

    @property
    def pid(self) -> int:
        return int(self.path.name.split(".")[3])

    @property
    def newest(self) -> int:
        """The last step that it applied; -1: none."""
        return max(self.applied, default=-1)

    @property
    def lives(self) -> bool:
        """Its number may be another process's by now: that one has not this folder in its command line."""
        try:
            return str(self.path.parent).encode() in Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return False

    def read(self) -> None:
        """What was written since."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._take(json.loads(line))

    def _take(self, said: dict[str, Any]) -> None:
        generation = said["generation"]
        if "tried" in said:
            step, rows = said["tried"], said["rows"]
            before = self.tried.get((step, generation), [])
            # micro-batches are of one attempt; rows that come again are of the next
            self.tried[step, generation] = rows if set(rows) & set(before) else before + rows
            self.last[step] = generation
        elif "applied" in said:
            self.applied[said["applied"]] = Applied(said["t"], generation, said["loss"], said["mark"], said["nodes"])
        elif "began" in said:
            self.began_s = said["t"]
        elif "ended" in said:
            self.ended = True


def read(folder: Path, known: dict[str, Life]) -> None:
    """Every process's journal as far as it goes, into ``known``, by its file's name."""
    for path in folder.glob("*.jsonl"):
        known.setdefault(path.name, Life(path)).read()
