"""The training step: batch -> gradient -> agreement -> update -> record.

share      this process's rows of the global batch
gradient   forward and backward; pieces reach the exchange as backward makes them
agree      everyone's sums, and a verdict
update     APPLY: normalise once, clip, optimizer step. REDO, SKIP: as if the step had never been
reconcile  what the scheme does to weights after an update (averaging every k steps)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.contract import Agreement, Engine, Exchange, LinkError, Rule, Verdict
from paceline.report.record import Record

MAX_REDOS = 20


class Loop:
    """Every engine, exchange, link and codec meets here, and none of them is named."""

    def __init__(
        self,
        engine: Engine,
        exchange: Exchange,
        seat: Any,
        record: Record,
        clip: float | None = None,
        rejoin: Callable[[Any], Any] = lambda seat: seat,
        who: str = "this process",
    ):
        self.engine, self.exchange, self.seat, self.record = engine, exchange, seat, record
        self.clip, self.rejoin, self.who, self.num_steps = clip, rejoin, who, 0

    def step(self, batch: Any) -> Agreement:
        """One step on a global batch. Raises LinkError, naming who lost whom where, and FloatingPointError."""
        start = time.perf_counter()
        try:
            agreement = self._step(batch)
        except LinkError as error:
            raise LinkError(f"{self.who} at step {self.num_steps}: {error}", error.peer) from error
        ballot = agreement.ballot
        self.record.write(
            "step",
            step=self.num_steps,
            loss=ballot.loss_sum / ballot.weight if ballot.weight else None,
            weight=ballot.weight,
            seconds=time.perf_counter() - start,
            compute_seconds=ballot.seconds,
            verdict=agreement.verdict.value,
            drift=agreement.drift,
        )
        self.num_steps += 1
        return agreement

    def _step(self, batch: Any) -> Agreement:
        agreement, kept = self._agree(batch)
        ballot = agreement.ballot
        if not ballot.finite:
            self.engine.rollback(kept)
            raise FloatingPointError(
                f"the loss is not finite at step {self.num_steps} ({self.who}): loss sum {ballot.loss_sum} over weight "
                f"{ballot.weight:g}; weights are those before the step. Lower the learning rate, or join(clip=1.0)"
            )
        if agreement.verdict is Verdict.APPLY and ballot.weight:
            # the one place where sums become means: backward used the expected weight, this corrects it
            self.engine.update(agreement, Rule(batch.weight / ballot.weight, self.clip))
        elif agreement.verdict is not Verdict.ADOPTED:
            self.engine.rollback(kept)
        self.exchange.reconcile(self.engine.weights)
        return agreement

    def _agree(self, batch: Any) -> tuple[Agreement, Any]:
        for _ in range(MAX_REDOS):
            kept = self.engine.snapshot()
            share = batch.share(self.seat)
            self.exchange.before(self.engine.weights)
            forms, offer = self.exchange.forms(), self.exchange.offer
            try:
                ballot = self.engine.gradient(share, 1 / batch.weight, forms, offer)
            except BaseException:
                self.engine.rollback(kept)
                raise
            agreement = self.exchange.agree(ballot)
            if agreement.verdict is not Verdict.REDO:
                return agreement, kept
            self.engine.rollback(kept)
            self.record.write("redo", step=self.num_steps, drift=agreement.drift)
            self.seat = self.rejoin(self.seat)
        raise LinkError(f"the step was refused {MAX_REDOS} times in a row")
