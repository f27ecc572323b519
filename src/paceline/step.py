"""The training step: batch -> gradient -> agreement -> update -> record.

share      this process's rows of the global batch
gradient   forward and backward; pieces reach the exchange as backward makes them
agree      everyone's sums, and a verdict
update     APPLY: normalise once, clip, optimizer step, the schedule moves. REDO, SKIP: as if the step had never been
reconcile  what the scheme does to weights after an update (averaging every k steps), and what holds replicas together

With overlap="forward" the engine holds the update until the next step reads the weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.contract import (
    Agreement,
    Ballot,
    Engine,
    Exchange,
    LinkError,
    NoGradient,
    NotFinite,
    Piece,
    Rule,
    UnlikeOptions,
    Verdict,
)
from paceline.data.load_balance import Balance, Change
from paceline.elastic.replica_sync import Drift
from paceline.engine.compute.precision import Scaler
from paceline.exchange.flow.forward_state_sync import Moved
from paceline.report.activity import Whereabouts
from paceline.report.record import Record
from paceline.report.stragglers import Stragglers

MAX_REDOS = 20


Gradient = Callable[[Any, float, Sequence[str], Callable[[Piece], None]], Ballot]
Kept = Callable[[Agreement, Rule], Callable[[], None]]  # before an update; the result is called once it was applied


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
        schedule: Any = None,
        scaler: Scaler | None = None,
        balance: Balance | None = None,
        drift: Drift | None = None,
        whereabouts: Whereabouts | None = None,
        stragglers: Stragglers | None = None,
    ):
        self.engine, self.exchange, self.seat, self.record = engine, exchange, seat, record
        self.clip, self.schedule, self.scaler, self.rejoin = clip, schedule, scaler or Scaler(1.0), rejoin
        self.who, self.num_steps, self.balance, self.drift = who, 0, balance, drift
        self.whereabouts, self.stragglers = whereabouts or Whereabouts(), stragglers
        self._update_s = 0.0
        self._torn = False  # a step began and was not agreed on
        self._weighed = balance  # what those who vote on this step were measured for
        self._why: list[str] = []
        self.kept: Kept | None = None  # of each update, where somebody may come late who is told of it
        self.terms: dict[str, float] = {}  # each named part of the last step's loss, as a mean
        self.stop = 0  # set by a signal: end after the step in which everyone knows of it
        self.moved: Moved | None = None  # where forward changes more than it computes, among several
        self.hung = False  # likewise: end after the step in which everyone is
        self.guests = 0  # the generation in which those are taken in who wait, in the process that knows of them
        self.follows = False  # likewise: one of them is given what all have, beside the steps

    def step(self, batch: Any, gradient: Gradient | None = None, /, **facts: Any) -> Agreement:
        """One step on a global batch. Raises LinkError, naming who lost whom where, NotFinite and NoGradient."""
        start, self._spent = time.perf_counter(), dict[str, float]()
        self.whereabouts.begin(self.num_steps)
        sent_bytes = self.exchange.link.sent_bytes
        try:
            agreement = self._step(batch, gradient or self.engine.gradient)
        except LinkError as error:
            raise LinkError(f"{self.who} at step {self.num_steps}: {error}", error.peer, error.resumes) from error
        ballot = agreement.ballot
        seconds = time.perf_counter() - start
        sent_bytes = self.exchange.link.sent_bytes - sent_bytes
        self.whereabouts.end(seconds, max(self._spent["wait_seconds"], getattr(batch, "wait_s", 0.0)))
        means = zip(self.engine.terms, ballot.terms, strict=False)  # a process without rows knows no names
        self.terms = {name: total / ballot.weight if ballot.weight else math.nan for name, total in means}
        self.record.write(
            "step",
            step=self.num_steps,
            loss=ballot.loss_sum / ballot.weight if ballot.weight else None,
            weight=ballot.weight,
            seconds=seconds,
            compute_seconds=ballot.seconds,
            **self._spent,
            **({"sent_bytes": sent_bytes} if self.exchange.link.size > 1 else {}),
            verdict=agreement.verdict.value,
            drift=agreement.drift,
            norm=self.engine.norm,
            **({"terms": self.terms} if self.terms else {}),
            **({"samples": ballot.samples} if ballot.samples else {}),
            **facts,
        )
        if (why := list(self.exchange.why())) != self._why:
            self.record.write("forms", step=self.num_steps, forms=list(self.exchange.forms()), why=why)
            self._why = why
        self.num_steps += 1
        if (self.balance or self.stragglers) and getattr(batch, "dealt", False):
            rows = self.seat.dealt(int(batch.weight))
            if self.stragglers:
                self.stragglers.after(self.num_steps, rows, ballot.paces, sum(ballot.took), sent_bytes)
            # a step that others had agreed on before all met again says nothing to whoever measures from there on
            met_again = self.balance is not self._weighed
            if self.balance and not met_again and (change := self.balance.after(rows, ballot.paces)):
                self._deal(change)
        return agreement

    def _deal(self, change: Change) -> None:
        """Everyone was told the same, and so deals the next step alike."""
        self.seat = dataclasses.replace(self.seat, shares=change.new)
        self.exchange.dealt(max(change.new) / sum(change.new))
        self.record.write("shares", step=self.num_steps, **dataclasses.asdict(change))
        if self.stragglers:
            self.stragglers.dealt(self.num_steps, change.old, change.new, change.per_s)

    def _step(self, batch: Any, gradient: Gradient) -> Agreement:
        agreement, kept = self._agree(batch, gradient)
        ballot, begin = agreement.ballot, time.perf_counter()
        together = self.exchange.consensus == "step"
        if not ballot.finite and not self.scaler.can_shrink:
            raise self._lost(batch, ballot, kept, "loss")
        if agreement.verdict is Verdict.APPLY and (nothing := _trains_nothing(ballot, together)):
            self.engine.rollback(kept)
            raise NoGradient(f"step {self.num_steps} trains nothing: {nothing}. Weights are those before the step")
        if ballot.unlike and together and (how := self._unlike_options()):
            self.engine.rollback(kept)
            raise UnlikeOptions(
                f"the optimizer's numbers differ between processes at step {self.num_steps}: {how}. Change them on all "
                f"alike, as a scheduler does. Weights are those before the step"
            )
        if agreement.verdict is Verdict.APPLY and ballot.weight:
            # the one place where sums become means: backward used the expected weight, this corrects it
            scale = batch.weight / ballot.weight / self.scaler.scale
            rule = Rule(scale, self.clip, check=True, step=self.num_steps)
            told = self.kept(agreement, rule) if self.kept else None
            with self.whereabouts.at("updating the weights"):
                applied = self.engine.update(agreement, rule)
            if not applied:
                agreement.verdict = Verdict.SKIP
                if not self.scaler.can_shrink:
                    raise self._lost(batch, ballot, kept, "gradient")
            else:
                if told:
                    told()
                if self.schedule and together:
                    self.schedule.step()
            self.scaler.move(agreement.verdict is Verdict.APPLY)
        if self.schedule and not together:
            self.schedule.step()  # alike on all nodes, also on one that has no rows of a short batch
        if agreement.verdict is Verdict.SKIP or not ballot.weight:
            self.engine.rollback(kept)
        agreement.pieces = []  # kept, they would lie in the middle of the next step's memory
        self._update_s = time.perf_counter() - begin
        if not together:
            self.exchange.reconcile(self.engine.weights)
        if self.drift:
            self.drift.after(agreement.drift, self.num_steps)
        self._spent["update_seconds"] = time.perf_counter() - begin
        if self.moved and agreement.verdict is Verdict.APPLY and ballot.weight:
            with self.whereabouts.at("comparing what forward changes"):
                self.moved.after(ballot)
        return agreement

    def _agree(self, batch: Any, gradient: Gradient) -> tuple[Agreement, Any]:
        if self._torn and (self.exchange.link.size > 1 or self.engine.seat[1] > 1):
            raise LinkError("the step before was interrupted here, and the others are still in it; join again")
        for _ in range(MAX_REDOS):
            self._torn, self._weighed = True, self.balance
            kept, begin = self.engine.snapshot(), time.perf_counter()
            with self.whereabouts.at("waiting for its data"):
                share = batch.share(self.seat)
                self.engine.held = getattr(batch, "held", None)
            self._spent["wait_seconds"] = time.perf_counter() - begin
            self.engine.place(self.seat, self.num_steps)
            self.exchange.before()
            forms, offer, waited = self.exchange.forms(), self.exchange.offer, self.engine.waited_s
            try:
                with self.whereabouts.at("computing the gradient"):
                    ballot = gradient(share, self.scaler.scale / batch.weight, forms, offer)
            except LinkError as error:
                self.engine.rollback(kept)
                begin = time.perf_counter()
                with self.whereabouts.at("meeting those who are left"):
                    agreement = self.exchange.recover(error)
            except BaseException as error:
                self.engine.rollback(kept)
                self._torn = not isinstance(error, NotFinite)  # which everyone raises
                raise
            else:
                ballot.stop, ballot.hung = self.stop, self.hung
                ballot.guests, ballot.follows = self.guests, self.follows
                if self.moved:
                    self.moved.vote(ballot)
                ballot.expected, ballot.samples = batch.weight, getattr(batch, "held", 0) or 0
                begin = time.perf_counter()
                ballot.fixed = self._update_s
                own_s = ballot.seconds - (self.engine.waited_s - waited)
                ballot.busy = ballot.fixed + getattr(batch, "wait_s", 0.0) + max(0.0, own_s)
                with self.whereabouts.at("agreeing on the step", waits=True):
                    agreement = self.exchange.agree(ballot)
                self._torn = False
            self._spent["exchange_seconds"] = time.perf_counter() - begin
            if agreement.verdict is not Verdict.REDO:
                return agreement, kept
            self.engine.rollback(kept)
            self.record.write("redo", step=self.num_steps, drift=agreement.drift)
            self.seat = self.rejoin(self.seat)
        raise LinkError(f"{self.who}: step {self.num_steps} was refused {MAX_REDOS} times; giving up")

    def _unlike_options(self) -> str:
        """How, in the words of all."""
        words = json.dumps([self.who, self.engine.options()]).encode()
        return self.engine.compare_options([json.loads(each) for each in self.exchange.gather(words) if each])

    def _lost(self, batch: Any, ballot: Ballot, kept: Any, what: str) -> NotFinite:
        """The step has never been; looking for the cause computes it again, and leaves no trace either."""
        self.engine.rollback(kept)
        found = self.engine.diagnose(batch.share(self.seat), backward=what == "gradient")
        self.engine.rollback(kept)
        mine = f"{found} ({self.who})".encode() if found else b""
        # between averages nobody else knows, and nobody answers
        said = self.exchange.gather(mine) if self.exchange.consensus == "step" else [mine]
        first = next((words.decode() for words in said if words), "")
        where = f"; the first number that is not finite: {first}" if first else ""
        given = [group.get("lr") for group in self.engine.optimizer.param_groups]
        rates = ", ".join(f"{rate:g}" for rate in sorted({float(rate) for rate in given if rate is not None}))
        return NotFinite(
            f"the {what} is not finite at step {self.num_steps}: loss sum {ballot.loss_sum} over weight "
            f"{ballot.weight:g}, learning rate {rates or 'none'}{where}. Weights are those "
            f"before the step. Lower the learning rate, add warm-up, or join(clip=1.0)"
        )


def _trains_nothing(ballot: Ballot, together: bool) -> str:
    """Why, or nothing. A process whose rows do not count is no reason; where all have none, or no weight, it is.

    ``together``: the ballot is everyone's.
    """
    if ballot.constant or (together and ballot.weight and 1 not in ballot.used):
        return (
            "the loss does not require grad, or no trainable parameter is part of it; look for torch.no_grad(), "
            "set_grad_enabled(False), inference_mode(), .detach() and .item() before it, and for frozen parameters"
        )
    if together and not ballot.weight:
        return (
            "nothing in the global batch counts: every process's weight is 0; look at the masks, the ignored targets "
            "and the weights of classes, or leave such a batch out on all processes"
        )
    return ""
