"""The training step: batch -> gradient -> agreement -> update.

share      this process's rows of the global batch
gradient   forward and backward; pieces reach the exchange as backward makes them
collect    everyone's sums are here
commit     the one vote, and what has come of the step: all apply it, or nobody does
update     APPLY: normalise once, clip, optimizer step, the schedule moves. REDO, SKIP: as if the step had never been
reconcile  what the scheme does to weights after an update (averaging every k steps)

Observers are told of each of these. With overlap="forward" the engine holds the update until the next step reads the
weights. Every engine, exchange, link and codec meets here, and none of them is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.contract import Agreement, Ballot, GlobalBatch, LinkError, NotFinite, Piece, StepSummary, Verdict
from paceline.report import activity
from paceline.step.run_state import RunState
from paceline.step.update import update

MAX_REDOS = 20
Gradient = Callable[[Any, float, Sequence[str], Callable[[Piece], None]], Ballot]


def step(run: RunState, batch: GlobalBatch, gradient: Gradient | None = None, /, **facts: Any) -> Agreement:
    """One step on a global batch. Raises LinkError, naming who lost whom where, NotFinite and NoGradient."""
    for each in run.observers:
        batch = each.takes(batch, gradient is not None)
    for each in run.observers if gradient is None else ():
        batch = each.reads(batch, own=False)
    start, spent, sent_bytes = time.perf_counter(), dict[str, float](), run.link.sent_bytes
    run.activity.begin(run.num_steps)
    try:
        agreement, kept = _agree(run, batch, gradient or run.engine.gradient, spent)
        begin = time.perf_counter()
        update(run, batch, agreement, kept)
        run.fixed_s = time.perf_counter() - begin
        if run.exchange.consensus != "step":
            with run.activity.at(activity.AVERAGE):
                run.exchange.reconcile(run.engine.weights)
        for each in run.observers:
            each.updated(agreement)
        spent["update_seconds"] = time.perf_counter() - begin
    except LinkError as error:
        raise LinkError(f"{run.who} at step {run.num_steps}: {error}", error.peer, error.resumes) from error
    seconds = time.perf_counter() - start
    run.activity.end(seconds, max(spent["wait_seconds"], batch.wait_s))
    sent_bytes = run.link.sent_bytes - sent_bytes
    run.last, run.num_steps = agreement, run.num_steps + 1
    summary = StepSummary(run.num_steps - 1, batch, agreement, seconds, spent, sent_bytes, facts)
    for each in run.observers:
        each.ends(summary)
    return agreement


def _agree(run: RunState, batch: GlobalBatch, gradient: Gradient, spent: dict[str, float]) -> tuple[Agreement, Any]:
    """What all agreed on, and the engine's snapshot before it."""
    engine, exchange, control = run.engine, run.exchange, run.control
    if run.torn and (control.size > 1 or engine.seat[1] > 1):
        raise LinkError("the step before was interrupted here, and the others are still in it; join again")
    for _ in range(MAX_REDOS):
        run.torn, kept, begin = True, engine.snapshot(), time.perf_counter()
        with run.activity.at(activity.DATA):
            share = batch.share(run.seat)
            engine.held = batch.held
        spent["wait_seconds"] = time.perf_counter() - begin
        engine.place(run.seat, run.num_steps)
        exchange.before()
        forms, waited_s = exchange.forms(), engine.waited_s
        offer: Callable[[Piece], None] = exchange.offer
        for each in run.observers:
            offer = each.offering(offer)
        begin = time.perf_counter()
        try:
            with run.activity.at(activity.GRADIENT):
                ballot = gradient(share, run.scaler.scale / batch.weight, forms, offer)
            ballot.stop, ballot.hung = run.stop, run.hung
            ballot.expected, ballot.samples = batch.weight, batch.held or 0
            for each in run.observers:
                each.votes(ballot)
            begin = time.perf_counter()
            own_s = ballot.seconds - (engine.waited_s - waited_s)
            ballot.fixed, ballot.busy = run.fixed_s, run.fixed_s + batch.wait_s + max(0.0, own_s)
            with run.activity.at(activity.VOTE, waits=True):
                ballot = exchange.collect(ballot)
        except LinkError as error:
            engine.rollback(kept)
            with run.activity.at(activity.MEETING):
                agreement = control.recover(error)
        except BaseException as error:
            engine.rollback(kept)
            run.torn = not isinstance(error, NotFinite)  # which everyone raises
            raise
        else:
            with run.activity.at(activity.VOTE, waits=True):
                agreement = control.commit(ballot, exchange.finish)
        run.torn = False
        spent["exchange_seconds"] = time.perf_counter() - begin
        if agreement.verdict is not Verdict.REDO:
            return agreement, kept
        engine.rollback(kept)
        for each in run.observers:
            each.again(run.num_steps, agreement)
    raise LinkError(f"{run.who}: step {run.num_steps} was refused {MAX_REDOS} times; giving up")
