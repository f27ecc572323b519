"""A node that failed is started again, where others go on without it, and comes to them late with the run's ticket."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RETURNS = 3  # of one node, as long as it does not live for PEACE_S in between
PEACE_S = 3600.0  # longer than it waits to be taken in
PAUSE_S = 1.0  # before the first; before each later one twice as long


@dataclass(frozen=True)
class Child:
    """A process of a node."""

    node: int
    process: subprocess.Popen[bytes]

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        if self.code is None:
            self.process.kill()
            self.process.wait()


class Again:
    """``begin``: starts a node's processes anew. ``ticket`` is there as soon as there is a run to come to."""

    def __init__(self, ticket: Path, returns: int, begin: Callable[[int], None]):
        self.ticket, self.returns, self.begin = ticket, returns, begin
        self._num_begun: dict[int, int] = {}
        self._begun_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = {}

    def hopes(self, node: int) -> bool:
        """Whether a node that failed may still come back."""
        return self.ticket.exists() and self._count(node) < self.returns

    def _count(self, node: int) -> int:
        """How often a node that failed has come back since it last lived in peace."""
        ended_s = self._ended_s.setdefault(node, time.monotonic())
        lived_s = ended_s - self._begun_s.get(node, ended_s)
        return self._num_begun.get(node, 0) if lived_s <= PEACE_S else 0

    def look(self, children: list[Child]) -> list[int]:
        """The nodes that have been started again: those that failed, when their pause was over."""
        begun = []
        for node in dict.fromkeys(child.node for child in children if child.code):
            if not self.hopes(node):
                continue
            count, now = self._count(node), time.monotonic()
            if now < self._ended_s[node] + PAUSE_S * 2**count:
                continue
            del self._ended_s[node]
            self._num_begun[node], self._begun_s[node] = count + 1, now
            for child in [child for child in children if child.node == node]:
                child.end()
                children.remove(child)
            print(f"paceline: node {node} ended, and is started again", file=sys.stderr, flush=True)
            self.begin(node)
            begun.append(node)
        return begun
