"""A node that was lost between two averages: the samples that it alone has used since the last are dealt again.

*Laws*: every sample of an epoch is in the weights once, whoever is lost, where samples have numbers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from paceline.contract import GlobalBatch
from paceline.data.batches import Batch
from paceline.data.sampler import Assignment
from paceline.data.sources import Window
from paceline.messages import Vote
from paceline.report.log import log
from paceline.report.step_observer import StepObserver
from paceline.step.manual_loop import ConsumedBatch
from paceline.step.run_state import RunState
from paceline.transport import ViewChange


@dataclass
class Used:
    """A batch that is in no average yet: whose rows were whose, and who of these nodes is which rank by now."""

    batch: GlobalBatch
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
        assignment = self.run.assignment
        self._used.append(Used(self._batch, assignment, list(range(assignment.num_nodes))))

    def averaged(self) -> None:
        self._used = []

    def note(self, news: ViewChange) -> None:
        """Whose samples are in no average that anybody has."""
        again, lost = self.run.cursor.again, 0
        for used in self._used:
            left = [used.nodes[rank] for rank in news.previous_ranks]
            for node in sorted(set(used.nodes) - set(left)):
                place = dataclasses.replace(used.assignment, node=node, local_rank=0, local_size=1)
                if isinstance(used.batch, Batch) and not isinstance(used.batch.source, Window):
                    again += used.batch.indices_of(place)
                else:
                    lost += len(place.rows(int(used.batch.weight)))
            used.nodes = left
        if len(news.previous_ranks) == 1:
            self._used = []  # nobody is left to average with
        words = (
            f"{len(again)} samples that are in no average, for who had them was lost, are dealt again after this epoch"
        )
        if lost:
            words += f"; {lost} are left out, which came from a stream or from the script and cannot be read again"
        if (again or lost) and self.run.leader:
            log.warning(words)
        if again or lost:
            self.run.record.write("hint", text=words)
