"""Redistributes the samples that a node used since the last average and lost with its failure.

*Invariants*: if samples have numbers, each sample of an epoch contributes to the weights once, whichever node fails.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from paceline.contract import GlobalBatch
from paceline.data.batches import Batch
from paceline.data.sampler import Assignment, Indices
from paceline.data.sources import Window
from paceline.messages import StepOutcome, Vote
from paceline.report.log import log
from paceline.report.step_observer import StepObserver
from paceline.step.manual_loop import ConsumedBatch
from paceline.step.run_state import RunState
from paceline.transport import ViewChange


@dataclass
class UsedBatch:
    """A batch that is in no average yet: its sample numbers, if any, their assignment, and the nodes that are left."""

    indices: Indices | None
    num_rows: int
    assignment: Assignment
    nodes: list[int]


class Redistribution(StepObserver):
    """In every process, if node failures are survived and nodes do not synchronise on every step."""

    def __init__(self, run: RunState):
        self.run = run
        self._batch = GlobalBatch()
        self._used: list[UsedBatch] = []

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        self._batch = batch.batch if isinstance(batch, ConsumedBatch) else batch
        return batch

    def votes(self, vote: Vote) -> None:
        batch, assignment = self._batch, self.run.assignment
        if assignment.num_nodes == 1:
            return  # a single node does not average
        indices = batch.indices if isinstance(batch, Batch) and not isinstance(batch.source, Window) else None
        self._used.append(UsedBatch(indices, int(batch.weight), assignment, list(range(assignment.num_nodes))))

    def again(self, step: int, outcome: StepOutcome) -> None:
        self._used = self._used[:-1]

    def averaged(self) -> None:
        self._used = []

    def on_view_change(self, change: ViewChange) -> None:
        """Assigns the samples again that only failed nodes had used since the last average."""
        found: list[int] = []
        unnumbered = 0
        for used in self._used:
            left = [used.nodes[rank] for rank in change.previous_ranks]
            for node in sorted(set(used.nodes) - set(left)):
                rows = dataclasses.replace(used.assignment, node=node, local_rank=0, local_size=1).rows(used.num_rows)
                if used.indices is None:
                    unnumbered += len(rows)
                else:
                    found += used.indices[rows.start : rows.stop].tolist()
            used.nodes = left
        if len(change.previous_ranks) == 1:
            self._used = []  # no node is left to average with
        self.run.cursor.again += found
        texts = []
        if found:
            texts.append(f"{len(found)} samples that a failed node had used since the last average are assigned again")
        if unnumbered:
            texts.append(
                f"{unnumbered} samples that a failed node had used since the last average are left out: they came from "
                f"a stream, or from the script, and cannot be read again"
            )
        for text in texts:
            if self.run.leader:
                log.warning(text)
            self.run.record.write("hint", text=text)
