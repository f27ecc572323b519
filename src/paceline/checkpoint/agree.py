"""Agreement on the checkpoint to resume from: the newest one that is complete and identical for every process.

Each process reports the newest checkpoint that it can read. If the reports differ, all search again, up to the oldest
step reported, until they are equal. So a damaged file or a stale folder on one node costs steps, not the run. A process
without any checkpoint receives the chosen one. Rank 0 must have it: a new run must not resume from another's files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.errors import CheckpointError

Reports = Mapping[int, Mapping[str, Any]]  # by rank, of the ranks that have a checkpoint


@dataclass(frozen=True)
class Choice:
    """Equal in all processes, except that ``found`` is None in the ``lacking`` ranks, which see no checkpoint.

    ``skipped``: newer checkpoints that some process could not use, with the reason.
    """

    found: Checkpoint | None = None
    lacking: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()


def agree(
    find: Callable[[int | None], Checkpoint | None], gather: Callable[[bytes], list[bytes]], where: object
) -> Choice | None:
    """Collective: every process must call it. Returns None where no process has a checkpoint.

    ``find``: the newest complete checkpoint here, up to the given step. ``gather``: an all-gather of messages. An error
    of ``find`` in one process is raised in all. Raises ValueError where the processes have no checkpoint in common.
    """
    rounds: list[Reports] = []
    first_steps: list[int | None] = []
    lacking: tuple[int, ...] = ()
    max_step: int | None = None
    while True:
        found: Checkpoint | None = None
        error: Exception | None = None
        try:
            found = find(max_step)
        except (CheckpointError, ValueError) as caught:
            error = caught
        except OSError as caught:
            error = CheckpointError(f"this process cannot read {where} ({caught.strerror or caught})")
        own_report = {
            "step": found and found.step,
            "seal": found and found.seal,
            "damaged": found.damaged if found else (),
            "error": str(error or ""),
            "refused": isinstance(error, CheckpointError),
        }
        all_reports = [json.loads(message) for message in gather(json.dumps(own_report).encode())]
        if error:
            raise error
        for rank, report in enumerate(all_reports):
            if report["error"]:
                kind = CheckpointError if report["refused"] else ValueError
                raise kind(f"rank {rank}: {report['error']}")
        if rounds and len(all_reports) != len(first_steps):  # a node failed, and the ranks were assigned anew
            rounds, max_step = [], None
            continue
        if not rounds:
            first_steps = [report["step"] for report in all_reports]
            lacking = tuple(rank for rank, step in enumerate(first_steps) if step is None)
            if set(first_steps) == {None}:
                return None
        reports = {rank: report for rank, report in enumerate(all_reports) if rank not in lacking}
        steps = [report["step"] for report in reports.values()]
        if 0 in lacking or None in steps:
            raise ValueError(
                f"restore: the processes found different checkpoints in {where}, of steps {first_steps} (None: none), "
                f"and none in common; put the run's folder where every node sees it"
            )
        rounds.append(reports)
        if len({report["seal"] for report in reports.values()}) == 1:
            return Choice(found, lacking, tuple(dict.fromkeys(_skipped(rounds))))
        max_step = min(steps) if len(set(steps)) > 1 else steps[0] - 1


def _skipped(rounds: list[Reports]) -> Iterable[str]:
    for reports in rounds:
        newest = max(report["step"] for report in reports.values())
        for rank, report in reports.items():
            yield from report["damaged"]
            if report["step"] < newest and not report["damaged"]:
                yield f"step {newest}, which rank {rank} does not see"
    for reports in rounds[:-1]:
        if len(steps := {report["step"] for report in reports.values()}) == 1:
            yield f"step {steps.pop()}, of which ranks see different checkpoints"
