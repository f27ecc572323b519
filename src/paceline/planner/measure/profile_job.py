"""Step observer of a trial or a profile: limits the batch, times the steps, and starts the profiler."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from paceline.contract import GlobalBatch
from paceline.data.batches import Batch, UserBatch
from paceline.engine.compute import batch as batches_
from paceline.engine.compute import timeline
from paceline.engine.node.optimizer_shards import division
from paceline.planner.measure import layers, methods, profiler, stopwatch
from paceline.report.step_observer import StepObserver, StepSummary
from paceline.step.run_state import RunState


class ProfileJob(StepObserver):
    """``request_path``: of a profile, after which the process ends. ``watch``: the stopwatch of a trial."""

    def __init__(self, run: RunState, watch: stopwatch.Stopwatch | None, request_path: Path | None):
        self.run, self.stopwatch, self.request_path = run, watch, request_path

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        """The part of the batch that the trial computes."""
        if self.request_path:
            if own:  # the profiler cannot see into the user's own training loop
                raise SystemExit(0)
            profiler.take_profile(self.request_path, _facts(self.run, batch))
        if stopwatch.times() > 1 and not batch.assigned:
            raise ValueError("the script builds its own batches; larger global batches are not tried with them")
        rows = batch.weight if own or not self.stopwatch else self.stopwatch.part(int(batch.weight))
        if rows == int(batch.weight):
            return batch
        whole = batch.share(self.run.assignment)
        if _cuts(whole, batch):
            return UserBatch(layers.first_samples(whole, int(rows)), float(rows))
        if isinstance(batch, Batch):
            batch.use_prefetch(lambda *_: whole)
        return batch

    def ends(self, summary: StepSummary) -> None:
        if self.stopwatch:
            vote, run = summary.outcome.vote, self.run
            alike = run.exchange.consensus == "step" or run.world.num_nodes == 1
            slowest_s = max((busy for busy, _ in vote.paces), default=None)
            self.stopwatch.tick(summary.batch.weight, vote.seconds if alike else slowest_s)


def _cuts(rows: Any, batch: GlobalBatch) -> bool:
    """Whether the batch can be divided along its first dimension into smaller batches."""
    try:
        return batches_.divisible(rows, batch.num_local_samples) > 0
    except ValueError:
        return False


def _facts(run: RunState, batch: GlobalBatch) -> profiler.ProfiledStep:
    job, start = run.job, time.perf_counter()
    rows = batch.share(run.assignment)
    input_s = time.perf_counter() - start
    forward = job.forward or batches_.call

    def compute(rows: Any) -> torch.Tensor:
        value, times, weight, _ = batches_.judged(job.loss, forward(job.model, rows), rows)
        return value * (times / weight)

    return profiler.ProfiledStep(
        job.model,
        job.optimizer,
        run.engine,
        compute,
        rows,
        int(batch.weight),
        job.batch_size,
        run.cursor.epochs * (batch.num_steps or 0),
        job.clip,
        input_s,
        division(job.optimizer),
        lambda rows, passes: json.loads(timeline.record(run.engine, job.model, rows, passes).to_json()),
        job.accumulate,
        job.precision,
        job.batch_norm,
        lambda engine: methods.measure(run, engine),
        _cuts(rows, batch),
    )
