"""Every step in the record: its loss, its seconds, its bytes; steps that were refused, and forms that have changed."""

from __future__ import annotations

import math

from paceline.contract import Agreement, Control, Engine, Exchange, StepObserver, StepSummary
from paceline.report.record import Record


class StepRecord(StepObserver):
    """Of one process; ``terms``: each named part of the last step's loss, as a mean."""

    def __init__(self, record: Record, engine: Engine, exchange: Exchange, control: Control):
        self.record, self.engine, self.exchange, self.control = record, engine, exchange, control
        self.terms: dict[str, float] = {}
        self._why: list[str] = []

    def again(self, step: int, agreement: Agreement) -> None:
        self.record.write("redo", step=step, drift=agreement.drift)

    def ends(self, summary: StepSummary) -> None:
        agreement, ballot = summary.agreement, summary.agreement.ballot
        means = zip(self.engine.terms, ballot.terms, strict=False)  # a process without rows knows no names
        self.terms = {name: total / ballot.weight if ballot.weight else math.nan for name, total in means}
        self.record.write(
            "step",
            step=summary.step,
            loss=ballot.loss_sum / ballot.weight if ballot.weight else None,
            weight=ballot.weight,
            seconds=summary.seconds,
            compute_seconds=ballot.seconds,
            **summary.spent,
            **({"sent_bytes": summary.sent_bytes} if self.control.size > 1 else {}),
            verdict=agreement.verdict.value,
            drift=agreement.drift,
            norm=self.engine.norm,
            **({"terms": self.terms} if self.terms else {}),
            **({"samples": ballot.samples} if ballot.samples else {}),
            **summary.facts,
        )
        if (why := list(self.exchange.why())) != self._why:
            self.record.write("forms", step=summary.step, forms=list(self.exchange.forms()), why=why)
            self._why = why
