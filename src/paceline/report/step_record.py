"""Every step in the event log: loss, seconds, bytes; retried steps, and changed gradient encodings."""

from __future__ import annotations

import math

from paceline.contract import Engine, Exchange
from paceline.messages import StepOutcome
from paceline.report.record import Record
from paceline.report.step_observer import StepObserver, StepSummary
from paceline.transport import Control, checksum


class StepRecord(StepObserver):
    """Writes the events of one process; ``terms``: the mean of each component of the last step's loss, by name, and
    ``metrics``: each value of its metric, "" where it has one."""

    def __init__(self, record: Record, engine: Engine, exchange: Exchange, control: Control):
        self.record, self.engine, self.exchange, self.control = record, engine, exchange, control
        self.terms: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self._reasons: list[str] = []

    def again(self, step: int, outcome: StepOutcome) -> None:
        self.record.write("redo", step=step, drift=outcome.drift)

    def ends(self, summary: StepSummary) -> None:
        outcome, vote = summary.outcome, summary.outcome.vote
        names, names_of_metrics = self.engine.terms  # a process without samples knows none
        means = zip(names, vote.terms, strict=False)
        self.terms = {name: total / vote.weight if vote.weight else math.nan for name, total in means}
        self._measure(names_of_metrics or ("",), vote.terms[len(names) :])
        self.record.write(
            "step",
            step=summary.step,
            loss=vote.loss_sum / vote.weight if vote.weight else None,
            weight=vote.weight,
            seconds=summary.seconds,
            compute_seconds=vote.seconds,
            **summary.spent,
            **({"sent_bytes": summary.sent_bytes} if self.control.size > 1 else {}),
            verdict=outcome.decision.value,
            drift=outcome.drift,
            norm=self.engine.norm,
            **({"terms": self.terms} if self.terms else {}),
            **{f"metric/{name}" if name else "metric": value for name, value in self.metrics.items()},
            **({"samples": vote.samples} if vote.samples else {}),
            **summary.facts,
        )
        if (reasons := list(self.exchange.explain())) != self._reasons:
            self.record.write("forms", step=summary.step, forms=list(self.exchange.forms()), why=reasons)
            self._reasons = reasons

    def _measure(self, names: tuple[str, ...], terms: tuple[float, ...]) -> None:
        """``terms``: a sum and a weight for each name, and of the processes with samples their checksums and number."""
        *pairs, (check, count) = [*zip(terms[::2], terms[1::2], strict=False)] or [(0.0, 0.0)]
        alike = len(pairs) == len(names) and check == count * checksum(names)
        named = zip(names, pairs, strict=False) if alike and count else ()
        self.metrics = {name: total / weight if weight else math.nan for name, (total, weight) in named}
        if count and not alike and self.engine.terms[1]:
            self.engine.hint = "the metric returned other names on other processes, so pace.metric has none"
