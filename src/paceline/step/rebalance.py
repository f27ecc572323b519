"""Reassigns samples as the nodes' speed changes, and reports stragglers."""

from __future__ import annotations

import dataclasses

from paceline.contract import GlobalBatch
from paceline.data.load_balance import Reassignment
from paceline.messages import StepOutcome
from paceline.report.step_observer import StepObserver, StepSummary
from paceline.report.stragglers import Stragglers
from paceline.step.run_state import RunState


class Rebalance(StepObserver):
    """Everyone is told the same of each step, and so deals the next one alike. ``stragglers``: named by the leader."""

    def __init__(self, run: RunState, stragglers: Stragglers | None = None):
        self.run, self.stragglers = run, stragglers
        self._measured_for = run.balance

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        self._measured_for = self.run.balance
        return batch

    def again(self, step: int, outcome: StepOutcome) -> None:
        self._measured_for = self.run.balance

    def ends(self, summary: StepSummary) -> None:
        run, vote = self.run, summary.outcome.vote
        stragglers = self.stragglers if run.leader else None
        if not summary.batch.assigned or not (run.balance or stragglers):
            return
        rows = run.assignment.rows_per_node(int(summary.batch.weight))
        if stragglers:
            stragglers.after(run.num_steps, rows, vote.paces, sum(vote.took), summary.sent_bytes)
        # a step that others had agreed on before all met again says nothing to whoever measures from there on
        met_again = run.balance is not self._measured_for
        if run.balance and not met_again and (change := run.balance.after(rows, vote.paces)):
            self._deal(change)

    def _deal(self, change: Reassignment) -> None:
        run = self.run
        run.assignment = dataclasses.replace(run.assignment, shares=change.new)
        run.exchange.on_assignment(max(change.new) / sum(change.new))
        run.record.write("shares", step=run.num_steps, **dataclasses.asdict(change))
        if self.stragglers and run.leader:
            self.stragglers.on_assignment(run.num_steps, change.old, change.new, change.per_s)
