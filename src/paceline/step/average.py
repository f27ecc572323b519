"""Averages weights every k steps (local SGD), or collects what each node has updated: on all nodes, or on none."""

from __future__ import annotations

from paceline.errors import LinkError, ShardsLost
from paceline.messages import Update
from paceline.report import activity
from paceline.step.run_state import RunState


def average(run: RunState, now: bool = True, state: bool = False) -> None:
    """``now``: also if it is not due; ``state``: until the next step every node holds all of the optimizer's state.
    Every process must call it. Raises LinkError."""
    exchange, engine = run.exchange, run.engine
    if exchange.consensus == "step" and not exchange.divides_optimizer:
        return
    # between an update of parts and their collection no step can begin
    before, run.interrupted = run.interrupted, run.interrupted or exchange.divides_optimizer
    with run.activity.at(activity.AVERAGE):
        try:
            targets = run.control.transact(lambda: exchange.average(engine.weights, now, state))
        except ShardsLost as error:
            raise LinkError(str(error), resumes=True) from None
        if targets is not None:
            exchange.averaged()
            engine.apply(Update(targets=targets))
            for each in run.observers:
                each.averaged()
    run.interrupted = before
