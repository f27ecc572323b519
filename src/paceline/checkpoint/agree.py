"""Agreement on the checkpoint to resume from: the newest that every process can read, whole and the same.

Each says what the newest is that it can read. Where they differ, all look again, no further than the oldest of these,
until they say the same; so one node's torn file, or a folder that lags behind, costs steps and not the run. Who sees
none at all has no say, and is to be sent it; but rank 0 must have it, lest a new run goes on from another's remains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.errors import CheckpointError

Said = Mapping[int, Mapping[str, Any]]  # by each rank that has something


@dataclass(frozen=True)
class Choice:
    """The same for all, but for ``kept``, which ranks that are ``lacking`` do not have.

    ``passed_over``: what newer ones somebody could not take, and why.
    """

    kept: Checkpoint | None = None
    lacking: tuple[int, ...] = ()
    passed_over: tuple[str, ...] = ()


def agreed(
    find: Callable[[int | None], Checkpoint | None], gather: Callable[[bytes], list[bytes]], where: object
) -> Choice | None:
    """None where nobody has any. Every process must call it.

    ``find``: the newest whole one here, no step after that given. ``gather``: everyone's words to everyone. Raises
    everywhere what ``find`` raised anywhere, and ValueError where they have none in common.
    """
    rounds: list[Said] = []
    first: list[int | None] = []
    lacking: tuple[int, ...] = ()
    most: int | None = None
    while True:
        kept: Checkpoint | None = None
        error: Exception | None = None
        try:
            kept = find(most)
        except (CheckpointError, ValueError) as caught:
            error = caught
        except OSError as caught:
            error = CheckpointError(f"{where} cannot be read here ({caught.strerror or caught})")
        mine = {
            "step": kept and kept.step,
            "seal": kept and kept.seal,
            "damaged": kept.damaged if kept else (),
            "error": str(error or ""),
            "refused": isinstance(error, CheckpointError),
        }
        everyone = [json.loads(words) for words in gather(json.dumps(mine).encode())]
        if error:
            raise error
        for rank, one in enumerate(everyone):
            if one["error"]:
                kind = CheckpointError if one["refused"] else ValueError
                raise kind(f"rank {rank}: {one['error']}")
        if rounds and len(everyone) != len(first):  # a node was lost: others have these ranks now
            rounds, most = [], None
            continue
        if not rounds:
            first = [one["step"] for one in everyone]
            lacking = tuple(rank for rank, step in enumerate(first) if step is None)
            if set(first) == {None}:
                return None
        said = {rank: one for rank, one in enumerate(everyone) if rank not in lacking}
        steps = [one["step"] for one in said.values()]
        if 0 in lacking or None in steps:
            raise ValueError(
                f"restore: the processes found different checkpoints in {where}, of steps {first} (None: none), and "
                f"none in common; put the run's folder where every node sees it"
            )
        rounds.append(said)
        if len({one["seal"] for one in said.values()}) == 1:
            return Choice(kept, lacking, tuple(dict.fromkeys(_passed_over(rounds))))
        most = min(steps) if len(set(steps)) > 1 else steps[0] - 1


def _passed_over(rounds: list[Said]) -> Iterable[str]:
    for said in rounds:
        newest = max(one["step"] for one in said.values())
        for rank, one in said.items():
            yield from one["damaged"]
            if one["step"] < newest and not one["damaged"]:
                yield f"step {newest}, which rank {rank} does not see"
    for said in rounds[:-1]:
        if len(steps := {one["step"] for one in said.values()}) == 1:
            yield f"step {steps.pop()}, of which ranks see different checkpoints"
