"""Sends rank 0's checkpoint over the network to nodes that do not see its folder; each receiver verifies it.

One process of each such node writes the files to a temporary folder, until all processes of the node have read them.

*Cost*: the checkpoint's bytes to every process; temporary disk space for one copy on each node that lacks it.
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
GENERATION = struct.Struct("<q")


class MembersChanged(Exception):
    """The members changed during the transfer: all current members must start it again."""


class CheckpointTransfer:
    """``nodes``: the node of each rank. ``gather``: an all-gather of messages. ``generation``: a number that changes
    with each change of members, read before the agreement on the checkpoint."""

    def __init__(self, rank: int, nodes: Sequence[int], gather: Callable[[bytes], list[bytes]], generation: int = 0):
        self.rank, self.nodes, self.gather, self._generation = rank, nodes, gather, GENERATION.pack(generation)
        self._errors: list[str] = []

    def send(self, checkpoint: Checkpoint | None, lacking: Sequence[int]) -> Checkpoint:
        """Collective: every process must call it; ``checkpoint`` is None in the ``lacking`` ranks.

        Raises CheckpointError in every process if one of them has no room or reads other bytes than were sent.
        Raises `MembersChanged` in every process.
        """
        source = checkpoint.path if checkpoint and self.rank == 0 else None
        node_ranks = [rank for rank in lacking if self.nodes[rank] == self.nodes[self.rank]]
        with contextlib.ExitStack() as stack:
            folder = None
            if node_ranks[:1] == [self.rank]:
                folder = self._try(lambda: stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
            sizes = self._try(lambda: [(source / name).stat().st_size for name in FILES]) if source else None
            sizes = self._gather_json(sizes)[0]
            for name, size in zip(FILES, sizes or (), strict=False):
                for start in range(0, size, PART_BYTES):
                    part = self._try(_part, source / name, start) if source else None
                    part = self._gather(part or b"")[0]
                    if folder and not self._errors:
                        self._try(_append, Path(folder) / name, part)
            folders = self._gather_json(folder)
            self._raise_errors()
            if self.rank in lacking:
                checkpoint = self._try(read, Path(folders[node_ranks[0]]))
            self._raise_errors()
        assert checkpoint
        return checkpoint

    def _gather_json(self, value: Any) -> list[Any]:
        return [json.loads(message) for message in self._gather(json.dumps(value).encode())]

    def _gather(self, message: bytes) -> list[bytes]:
        """All-gather among the members at the start. Survivors of a failure get equal replies and stop together."""
        replies = self.gather(self._generation + message)
        if len(replies) != len(self.nodes) or not all(reply.startswith(self._generation) for reply in replies):
            raise MembersChanged
        return [reply[GENERATION.size :] for reply in replies]

    def _try(self, work: Callable[..., Any], *given: Any) -> Any:
        """The other processes wait, so an error here is raised later, in all processes, by `_raise_errors`."""
        try:
            return work(*given)
        except (OSError, ValueError) as error:
            self._errors.append(str(error))
            return None

    def _raise_errors(self) -> None:
        for rank, errors in enumerate(self._gather_json(self._errors)):
            if errors:
                raise CheckpointError(
                    f"rank {rank} does not see the checkpoint, and its transfer failed: {errors[0]}; make room (TMPDIR "
                    f"names another place), or put the run's folder where every node sees it"
                )


def _part(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(PART_BYTES)


def _append(path: Path, part: bytes) -> None:
    with path.open("ab") as file:
        file.write(part)
