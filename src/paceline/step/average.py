"""Averaging of weights every k steps (local SGD): applied on all nodes, or on none."""

from __future__ import annotations

from paceline.messages import Update
from paceline.report import activity
from paceline.step.run_state import RunState


def average(run: RunState, now: bool = True) -> None:
    """``now``: also if it is not due. Every process must call it. Raises LinkError."""
    exchange, engine = run.exchange, run.engine
    if exchange.consensus == "step":
        return
    with run.activity.at(activity.AVERAGE):
        targets = run.control.transact(lambda: exchange.average(engine.weights, now))
        if targets is not None:
            exchange.averaged()
            engine.apply(Update(targets=targets))
            for each in run.observers:
                each.averaged()
