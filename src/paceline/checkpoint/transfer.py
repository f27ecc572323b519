"""Sends rank 0's checkpoint over the network to nodes that do not see its folder; it is checked as any other.

One process of each such node keeps the files where temporary ones lie, until the others of its node have read them.

*Cost*: the checkpoint's bytes to every process; room for them once on each node that lacks it.
"""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.checkpoint import STATE, TREE, WEIGHTS, Checkpoint, read
from paceline.errors import CheckpointError

FILES = WEIGHTS, STATE, TREE
PART_BYTES = 1 << 23
TEAM = struct.Struct("<q")


class Others(Exception):
    """Those who send are not those who began to: all who are there begin again."""


class CheckpointTransfer:
    """``rank`` of as many as ``nodes`` says the node of; ``gather``: everyone's words to everyone. ``team``: a number
    that is another after each change of members, as before all agreed on what is to be sent."""

    def __init__(self, rank: int, nodes: Sequence[int], gather: Callable[[bytes], list[bytes]], team: int = 0):
        self.rank, self.nodes, self.gather, self._team = rank, nodes, gather, TEAM.pack(team)
        self._faults: list[str] = []

    def send(self, kept: Checkpoint | None, lacking: Sequence[int]) -> Checkpoint:
        """Every process must call it, those ``lacking`` the checkpoint without ``kept``.

        Raises CheckpointError everywhere, where one of them has no room, or reads something else than was sent; and
        `Others`, everywhere.
        """
        source = kept.path if kept and self.rank == 0 else None
        here = [rank for rank in lacking if self.nodes[rank] == self.nodes[self.rank]]
        with contextlib.ExitStack() as stack:
            folder = None
            if here[:1] == [self.rank]:
                folder = self._try(lambda: stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
            found = self._try(lambda: [(source / name).stat().st_size for name in FILES]) if source else None
            sizes = self._tell(found)[0]
            for name, size in zip(FILES, sizes or (), strict=False):
                for start in range(0, size, PART_BYTES):
                    part = self._try(_part, source / name, start) if source else None
                    part = self._gather(part or b"")[0]
                    if folder and not self._faults:
                        self._try(_append, Path(folder) / name, part)
            folders = self._tell(folder)
            self._settle()
            if self.rank in lacking:
                kept = self._try(read, Path(folders[here[0]]))
            self._settle()
        assert kept
        return kept

    def _tell(self, what: Any) -> list[Any]:
        return [json.loads(words) for words in self._gather(json.dumps(what).encode())]

    def _gather(self, words: bytes) -> list[bytes]:
        """Of all who have begun. Those who are left hear the same, and leave off at the same place."""
        told = self.gather(self._team + words)
        if len(told) != len(self.nodes) or not all(each.startswith(self._team) for each in told):
            raise Others
        return [each[TEAM.size :] for each in told]

    def _try(self, work: Callable[..., Any], *given: Any) -> Any:
        """The others wait: what goes wrong is said at `_settle`, to all."""
        try:
            return work(*given)
        except (OSError, ValueError) as error:
            self._faults.append(str(error))
            return None

    def _settle(self) -> None:
        for rank, faults in enumerate(self._tell(self._faults)):
            if faults:
                raise CheckpointError(
                    f"rank {rank} does not see the checkpoint and could not be sent it: {faults[0]}; make room (TMPDIR "
                    f"names another place), or put the run's folder where every node sees it"
                )


def _part(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(PART_BYTES)


def _append(path: Path, part: bytes) -> None:
    with path.open("ab") as file:
        file.write(part)
