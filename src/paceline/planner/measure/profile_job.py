"""Step observer of a trial or a profile: how much of a batch the training takes, and what is reported of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from paceline.contract import GlobalBatch
from paceline.data.batches import Batch, UserBatch
from paceline.engine.checks.norm_layers import over_batches
from paceline.engine.compute import batch as batches_
from paceline.engine.compute import timeline
from paceline.engine.compute.precision import PRECISION
from paceline.engine.node.optimizer_shards import division
from paceline.planner.measure import layers, profiler, stopwatch
from paceline.report.step_observer import StepObserver, StepSummary
from paceline.step.run_state import RunState


class ProfileJob(StepObserver):
    """``form``: of a profile, which ends the process once it is filled in. ``stopwatch``: of a trial."""

    def __init__(self, run: RunState, watch: stopwatch.Stopwatch | None, form: Path | None):
        self.run, self.stopwatch, self.form = run, watch, form

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        """As much of it as the trial wants to see."""
        if self.form:
            if own:  # a loop of one's own cannot be looked into
                raise SystemExit(0)
            profiler.take_profile(self.form, _facts(self.run, batch))
        if stopwatch.times() > 1 and not batch.assigned:
            raise ValueError("the script brings batches of its own; larger global batches are not tried with those")
        rows = batch.weight if own or not self.stopwatch else self.stopwatch.part(int(batch.weight))
        if rows == int(batch.weight):
            return batch
        whole = batch.share(self.run.assignment)
        if _cuts(whole, batch):
            return UserBatch(layers.part(whole, int(rows)), float(rows))
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
    """Whether fewer of a batch's rows are fewer of its samples."""
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
        _ways(run),
        _cuts(rows, batch),
    )


def _ways(run: RunState) -> dict[str, Any]:
    """How what is recorded would travel between nodes that compute as this one does."""
    exchange, numel = run.exchange, sum(bucket.numel for bucket in run.engine.buckets)
    period, weights = getattr(exchange, "period", 0), run.engine.weights[0].dtype
    wide = PRECISION[run.engine.precision] or weights
    codec = getattr(exchange, "codec", None)
    everyones = run.job.batch_norm == "sync"
    norms = [getattr(m, "num_features", 0) for m in over_batches(run.job.model).values() if everyones]
    return {
        "factors": exchange.factors,
        "dense_bytes": codec.payload_bytes(numel, weights) / numel if codec else 0.0,
        "factor_bytes": wide.itemsize,
        "gathers": exchange.gathers or bool(codec and not codec.sums),
        "every": period,
        "forward": exchange.overlap == "forward",
        "loses": bool(codec and codec.fidelity == "approximate"),
        "norm_sums": 2 * len(norms) * run.job.accumulate + bool(norms),  # forward and backward, and who has rows
        "norm_numel": 4 * sum(norms) * run.job.accumulate,
    }
