"""The training step: batch -> gradient -> all-reduce and vote -> update.

share      this process's rows of the global batch
gradient   forward and backward; the exchange takes each bucket as soon as backward has computed it
collect    waits until the sums of all processes have arrived
commit     the vote, and its decision: all processes apply the step, or none does
update     COMMIT: normalise once, clip, optimizer step, scheduler step. RETRY, SKIP: the step is rolled back
average    with an exchange that does not synchronise on every step: the average of all weights, every k steps

Observers are called at each of these. With overlap="forward" the engine defers the update until the next step reads the
weights. Alone on a GPU, the numbers of a step are read while the next is computed (`step/ahead.py`). The step uses
engine, exchange, link and codec through their interfaces, and names no implementation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.contract import GlobalBatch
from paceline.errors import LinkError, NotFinite
from paceline.messages import Decision, Gradient, StepOutcome, Vote
from paceline.report import activity
from paceline.report.step_observer import StepSummary
from paceline.step.average import average
from paceline.step.run_state import RunState
from paceline.step.update import update

MAX_RETRIES = 20
ComputeGradient = Callable[[Any, float, Sequence[str], Callable[[Gradient], None]], Vote]


def step(run: RunState, batch: GlobalBatch, gradient: ComputeGradient | None = None, /, **facts: Any) -> StepOutcome:
    """One step on a global batch. Raises NotFinite, NoGradient, and LinkError that names failed rank and step."""
    for each in run.observers:
        batch = each.takes(batch, gradient is not None)
    for each in run.observers if gradient is None else ():
        batch = each.reads(batch, own=False)
    start, spent, sent_bytes = time.perf_counter(), dict[str, float](), run.link.sent_bytes
    ahead = run.ahead if run.ahead and run.ahead.begins(own=gradient is not None) else None
    run.activity.begin(run.num_steps)
    try:
        outcome, snapshot = _commit(run, batch, gradient or run.engine.gradient, spent)
        begin = time.perf_counter()
        (ahead.update if ahead else update)(run, batch, outcome, snapshot)
        run.fixed_s = time.perf_counter() - begin
        average(run, now=run.control.tolerates_loss and batch.ends_epoch)
        for each in run.observers:
            each.updated(outcome)
        spent["update_seconds"] = time.perf_counter() - begin
    except LinkError as error:
        raise LinkError(f"{run.identity} at step {run.num_steps}: {error}", error.peer, error.resumes) from error
    seconds = time.perf_counter() - start
    run.activity.end(seconds, max(spent["wait_seconds"], batch.wait_s))
    sent_bytes = run.link.sent_bytes - sent_bytes
    run.last, run.num_steps = outcome, run.num_steps + 1
    summary = StepSummary(run.num_steps - 1, batch, outcome, seconds, spent, sent_bytes, facts)
    if ahead:
        ahead.ends(summary)  # the summary of the step before
    for each in run.observers if not ahead else ():
        each.ends(summary)
    return outcome


def _commit(
    run: RunState, batch: GlobalBatch, gradient: ComputeGradient, spent: dict[str, float]
) -> tuple[StepOutcome, Any]:
    """The outcome that all processes agreed on, and the engine's snapshot before it."""
    engine, exchange, control = run.engine, run.exchange, run.control
    if run.interrupted and (control.size > 1 or engine.local_place[1] > 1):
        raise LinkError("the step before was interrupted in this process, and the others still wait in it; join again")
    for _ in range(MAX_RETRIES):
        run.interrupted, snapshot, begin = True, engine.snapshot(), time.perf_counter()
        with run.activity.at(activity.DATA):
            share = batch.share(run.assignment)
            engine.num_local_samples = batch.num_local_samples
        spent["wait_seconds"] = time.perf_counter() - begin
        engine.begin_step(run.assignment, run.num_steps)
        exchange.begin()
        forms, waited_s = exchange.forms(), engine.waited_s
        offer: Callable[[Gradient], None] = exchange.put
        for each in run.observers:
            offer = each.offering(offer)
        begin = time.perf_counter()
        try:
            with run.activity.at(activity.GRADIENT):
                vote = gradient(share, run.scaler.scale / batch.weight, forms, offer)
            vote.stop_signal, vote.launcher_lost = run.stop_signal, run.launcher_lost
            vote.expected, vote.samples = batch.weight, batch.num_local_samples or 0
            for each in run.observers:
                each.votes(vote)
            begin = time.perf_counter()
            own_s = vote.seconds - (engine.waited_s - waited_s)
            vote.fixed, vote.busy = run.fixed_s, run.fixed_s + batch.wait_s + max(0.0, own_s)
            with run.activity.at(activity.VOTE, waits=True):
                vote = exchange.collect(vote)
        except LinkError as error:
            engine.rollback(snapshot)
            with run.activity.at(activity.RENDEZVOUS):
                outcome = control.recover(error)
        except BaseException as error:
            engine.rollback(snapshot)
            run.interrupted = not isinstance(error, NotFinite)  # which all processes raise
            raise
        else:
            with run.activity.at(activity.VOTE, waits=True):
                outcome = control.commit(vote, exchange.finish)
        run.interrupted = False
        spent["exchange_seconds"] = time.perf_counter() - begin
        if outcome.decision is not Decision.RETRY:
            return outcome, snapshot
        engine.rollback(snapshot)
        for each in run.observers:
            each.again(run.num_steps, outcome)
    raise LinkError(f"{run.identity}: step {run.num_steps} was aborted {MAX_RETRIES} times; giving up")
