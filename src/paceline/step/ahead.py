"""Asynchronous steps of one process alone on a GPU: the next one begins before the numbers of this one are read.

The host gives the GPU a whole step, its update too, and only then waits for the step before, whose loss, weight and
norm it reads. So no synchronisation leaves the GPU without work, as in a loop that reads no loss.

A step that must be refused raises in the next `step`, or where its numbers are asked for before: the loss, the metric,
`save`, `evaluate`, `close`. Neither it nor the step that was given to the GPU after it has changed anything then.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.contract import GlobalBatch
from paceline.engine.compute.batch import Awaited
from paceline.engine.compute.unread import ReadsLater, StepNumbers, UnreadUpdate, serves
from paceline.exchange.flow.metric_tensors import MetricTensors
from paceline.messages import StepOutcome, Update, UpdateRule
from paceline.report import activity
from paceline.report.step_observer import StepObserver, StepSummary
from paceline.report.step_record import StepRecord
from paceline.step import refused_steps
from paceline.step.hints import Hints
from paceline.step.like_torch import UnreadLoss
from paceline.step.rebalance import Rebalance
from paceline.step.run_state import RunState

WAIT: tuple[type[StepObserver], ...] = (
    StepRecord,
    MetricTensors,
    Rebalance,
    Hints,
)  # observers that a step may end without


@dataclass
class Unread:
    """A step whose numbers are not read. ``back``: returns the run to where the step began, all but the weights."""

    batch: GlobalBatch
    outcome: StepOutcome
    snapshot: Any
    numbers: StepNumbers
    norm: Awaited
    back: Callable[[], None]
    summary: StepSummary | None = None


class Ahead:
    """The step that is not read, of a run."""

    def __init__(self, run: RunState, engine: ReadsLater):
        self.run, self.engine = run, engine
        self._updates = UnreadUpdate(run.job.optimizer, engine.weights[0].device)
        self._unread: Unread | None = None  # given to the GPU
        self._begun: Unread | None = None  # the present step's

    @staticmethod
    def serves(run: RunState, engine: ReadsLater) -> bool:
        """Whether steps of this run may be read later: nobody else waits for their numbers."""
        alone = run.world.world_size == 1 and not run.world.join_ticket and not run.control.tolerates_loss
        whole = not engine.divided and not engine.local_step.devices and run.job.batch_norm != "sync"
        whole = whole and not engine.optimizer_takes_factors  # an update by factors has no flag
        steps = run.exchange.consensus == "step" and run.exchange.overlap == "backward"
        plain = not run.scaler.moves and all(isinstance(each, WAIT) for each in run.observers)
        return alone and whole and steps and plain and serves(run.job.optimizer, engine.weights)

    def begins(self, own: bool) -> bool:
        """Whether the step that begins is read later. ``own``: the gradient comes from the user's own loop."""
        later = not own and self._updates.ready()
        if not later:
            self.read()
        self.engine.reads_later = later
        return later

    def update(self, run: RunState, batch: GlobalBatch, outcome: StepOutcome, snapshot: Any) -> None:
        """As `step.update.update`. Raises NoGradient."""
        vote, schedule, numbers = outcome.vote, run.job.scheduler, self.engine.numbers
        vote.weight = numbers.weight if isinstance(numbers.weight, float) else batch.weight  # until it is read
        try:
            refused_steps.refuse(run, outcome)
        except Exception:
            self.engine.rollback(snapshot)
            raise
        back = self._way_back()
        rule = UpdateRule(batch.weight / run.scaler.scale, run.clip, check=True, step=run.num_steps)
        with run.activity.at(activity.UPDATE):
            dense, _ = self.engine.placed(Update.of(outcome, rule), scaled=True)
            norm = self._updates(dense, rule, numbers)
        if schedule:
            schedule.step()
        outcome.gradients = []
        self._begun = Unread(batch, outcome, snapshot, numbers, norm, back)

    def ends(self, summary: StepSummary) -> None:
        """The step is given to the GPU. Reads the one before; raises NotFinite and NoGradient of it."""
        begun, self._begun = self._begun, None
        assert begun is not None
        begun.summary = summary
        self.read()
        self._unread = begun

    def read(self) -> None:
        """Waits for the numbers of the last step. Raises NotFinite, NoGradient."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        run, engine, vote = self.run, self.engine, unread.outcome.vote
        engine.read(vote, unread.numbers)
        engine.norm = float(unread.norm)
        if not vote.finite or not vote.weight or not math.isfinite(engine.norm):
            self._updates.again()
            unread.back()
            if not vote.weight:
                engine.rollback(unread.snapshot)
                refused_steps.refuse(run, unread.outcome)
            what = "gradient" if vote.finite else "loss"
            raise refused_steps.not_finite(run, what, unread.batch, vote, unread.snapshot)
        assert unread.summary is not None
        for each in run.observers:
            each.ends(unread.summary)

    def loss(self) -> UnreadLoss | None:
        """Of the last step; None where it has been read."""
        if self._unread is None:
            return None
        vote = self._unread.outcome.vote  # and no more: a script may keep the losses of all steps

        def value() -> float:
            if self._unread and self._unread.outcome.vote is vote:
                self.read()
            return vote.loss_sum / vote.weight if vote.weight else math.nan

        return UnreadLoss(value)

    def _way_back(self) -> Callable[[], None]:
        run, schedule, cursor = self.run, self.run.job.scheduler, self.run.cursor
        number, last, position = run.num_steps, run.last, (cursor.epoch, cursor.next_step)
        state = copy.deepcopy(schedule.state_dict()) if schedule else None
        groups = run.job.optimizer.param_groups
        options = [{key: group[key] for key in group if key != "params"} for group in groups if schedule]

        def back() -> None:
            run.num_steps, run.last, (cursor.epoch, cursor.next_step) = number, last, position
            if schedule:
                schedule.load_state_dict(state)
            for group, each in zip(groups, options, strict=False):
                group.update(each)

        return back
