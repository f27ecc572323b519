"""What was agreed on becomes an update, or all is as before the step."""

from __future__ import annotations

from typing import Any

from paceline.contract import Agreement, GlobalBatch, NotFinite, Rule, Verdict
from paceline.report import activity
from paceline.step import faults
from paceline.step.run_state import RunState


def update(run: RunState, batch: GlobalBatch, agreement: Agreement, kept: Any) -> None:
    """The optimizer's step and the schedule's. ``kept``: the engine's snapshot before. Raises NotFinite, NoGradient."""
    engine, ballot, schedule = run.engine, agreement.ballot, run.job.scheduler
    together = run.exchange.consensus == "step"

    def without_value(what: str) -> NotFinite:
        return faults.not_finite(
            what, lambda: batch.share(run.seat), kept, ballot, engine, run.control, together, run.who, run.num_steps
        )

    if not ballot.finite and not run.scaler.can_shrink:
        raise without_value("loss")
    try:
        faults.refuse(agreement, engine, run.control, together, run.who, run.num_steps)
    except Exception:
        engine.rollback(kept)
        raise
    if agreement.verdict is Verdict.APPLY and ballot.weight:
        # the one place where sums become means: backward used the expected weight, this corrects it
        rule = Rule(batch.weight / ballot.weight / run.scaler.scale, run.clip, check=True, step=run.num_steps)
        told = [then for each in run.observers if (then := each.applies(agreement, rule))]
        with run.activity.at(activity.UPDATE):
            applied = engine.update(agreement, rule)
        for then in told if applied else ():
            then()
        if applied and schedule and together:
            schedule.step()
        if not applied:
            agreement.verdict = Verdict.SKIP
            if not run.scaler.can_shrink:
                raise without_value("gradient")
        run.scaler.move(applied)
    if schedule and not together:
        schedule.step()  # alike on all nodes, also on one that has no rows of a short batch
    if agreement.verdict is Verdict.SKIP or not ballot.weight:
        engine.rollback(kept)
    agreement.pieces = []  # kept, they would lie in the middle of the next step's memory
