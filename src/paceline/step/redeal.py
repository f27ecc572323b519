"""Redistributes the samples that a node used since the last average and lost with its failure.

*Laws*: every sample of an epoch is in the weights once, whoever is lost, where samples have numbers.
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
class Used:
    """A batch that is in no average yet: its samples' numbers, if any, whose they were, and which nodes are left."""

    indices: Indices | None
    num_rows: int
    assignment: Assignment
    nodes: list[int]


class Redeal(StepObserver):
    """In every process, where nodes may be lost and do not agree on every step."""

    def __init__(self, run: RunState):
        self.run = run
        self._batch = GlobalBatch()
        self._used: list[Used] = []

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        self._batch = batch.batch if isinstance(batch, ConsumedBatch) else batch
        return batch

    def votes(self, vote: Vote) -> None:
        batch, assignment = self._batch, self.run.assignment
        if assignment.num_nodes == 1:
            return  # nobody averages
        indices = batch.indices if isinstance(batch, Batch) and not isinstance(batch.source, Window) else None
        self._used.append(Used(indices, int(batch.weight), assignment, list(range(assignment.num_nodes))))

    def again(self, step: int, outcome: StepOutcome) -> None:
        self._used = self._used[:-1]

    def averaged(self) -> None:
        self._used = []

    def note(self, news: ViewChange) -> None:
        """Whose samples are in no average that anybody has."""
        found: list[int] = []
        unnumbered = 0
        for used in self._used:
            left = [used.nodes[rank] for rank in news.previous_ranks]
            for node in sorted(set(used.nodes) - set(left)):
                rows = dataclasses.replace(used.assignment, node=node, local_rank=0, local_size=1).rows(used.num_rows)
                if used.indices is None:
                    unnumbered += len(rows)
                else:
                    found += used.indices[rows.start : rows.stop].tolist()
            used.nodes = left
        if len(news.previous_ranks) == 1:
            self._used = []  # nobody is left to average with
        self.run.cursor.again += found
        words = []
        if found:
            words.append(f"{len(found)} samples that a lost node had used since the last average are dealt again")
        if unnumbered:
            words.append(
                f"{unnumbered} samples that a lost node had used since the last average are left out: they came from a "
                f"stream, or from the script, and cannot be read again"
            )
        for each in words:
            if self.run.leader:
                log.warning(each)
            self.run.record.write("hint", text=each)
