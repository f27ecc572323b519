"""The seats follow the nodes' speed, and who is slower than its share says is named."""

from __future__ import annotations

import dataclasses

from paceline.contract import Agreement, GlobalBatch, StepObserver, StepSummary
from paceline.data.load_balance import Change
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

    def again(self, step: int, agreement: Agreement) -> None:
        self._measured_for = self.run.balance

    def ends(self, summary: StepSummary) -> None:
        run, ballot = self.run, summary.agreement.ballot
        stragglers = self.stragglers if run.leader else None
        if not summary.batch.dealt or not (run.balance or stragglers):
            return
        rows = run.seat.dealt(int(summary.batch.weight))
        if stragglers:
            stragglers.after(run.num_steps, rows, ballot.paces, sum(ballot.took), summary.sent_bytes)
        # a step that others had agreed on before all met again says nothing to whoever measures from there on
        met_again = run.balance is not self._measured_for
        if run.balance and not met_again and (change := run.balance.after(rows, ballot.paces)):
            self._deal(change)

    def _deal(self, change: Change) -> None:
        run = self.run
        run.seat = dataclasses.replace(run.seat, shares=change.new)
        run.exchange.dealt(max(change.new) / sum(change.new))
        run.record.write("shares", step=run.num_steps, **dataclasses.asdict(change))
        if self.stragglers and run.leader:
            self.stragglers.dealt(run.num_steps, change.old, change.new, change.per_s)
