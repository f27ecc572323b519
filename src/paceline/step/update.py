"""Applies the result of a vote as an update, or leaves everything as it was before the step."""

from __future__ import annotations

from typing import Any

from paceline.contract import GlobalBatch
from paceline.messages import Decision, StepOutcome, Update, UpdateRule
from paceline.report import activity
from paceline.step import refused_steps
from paceline.step.run_state import RunState


def update(run: RunState, batch: GlobalBatch, outcome: StepOutcome, snapshot: Any) -> None:
    """The optimizer's step and the scheduler's. ``snapshot``: the engine's, before. Raises NotFinite, NoGradient."""
    engine, vote, schedule = run.engine, outcome.vote, run.job.scheduler
    together = run.exchange.consensus == "step"

    if not vote.finite and not run.scaler.can_shrink:
        raise refused_steps.not_finite(run, "loss", batch, vote, snapshot)
    try:
        refused_steps.refuse(run, outcome)
    except Exception:
        engine.rollback(snapshot)
        raise
    if outcome.decision is Decision.COMMIT and vote.weight:
        # the one place where sums become means: backward used the expected weight, this corrects it
        scale = batch.weight / vote.weight / run.scaler.scale
        rule = UpdateRule(scale, run.clip, check=True, step=run.num_steps, squares=vote.squares)
        callbacks = [then for each in run.observers if (then := each.applies(outcome, rule))]
        with run.activity.at(activity.UPDATE):
            applied = engine.apply(Update.of(outcome, rule))
        for then in callbacks if applied else ():
            then()
        if applied and schedule and together:
            schedule.step()
        if not applied:
            outcome.decision = Decision.SKIP
            if not run.scaler.can_shrink:
                raise refused_steps.not_finite(run, "gradient", batch, vote, snapshot)
        run.scaler.move(applied)
    if schedule and not together:
        schedule.step()  # on all nodes, also on one that has no rows of a short batch
    if outcome.decision is Decision.SKIP or not vote.weight:
        engine.rollback(snapshot)
    outcome.gradients = []  # otherwise they would fragment the memory of the next step
