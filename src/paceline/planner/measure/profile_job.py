"""A training that is looked at by a trial or a profile: how much of the batch it sees, and what it says of itself."""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from paceline.data import batches
from paceline.engine.checks.norm_layers import over_batches
from paceline.engine.compute import batch as batches_
from paceline.engine.compute import timeline
from paceline.engine.compute.precision import PRECISION
from paceline.engine.node.optimizer_shards import division
from paceline.planner.measure import layers, profiler, stopwatch


def answer(pace: Any, batch: Any, gradient: Any) -> Any:
    """The batch, or as much of it as ``pace``'s trial wants to see. A profile ends the process, its form filled in."""
    if pace.form:
        if gradient:  # a loop of one's own cannot be looked into
            raise SystemExit(0)
        profiler.answer(pace.form, _facts(pace, batch))
    if stopwatch.times() > 1 and not getattr(batch, "dealt", False):
        raise ValueError(
            "the script brings rows of its own; that it brings as many on each of more machines is not tried"
        )
    rows = batch.weight if gradient or not pace.stopwatch else pace.stopwatch.part(int(batch.weight))
    if rows == int(batch.weight):
        return batch
    whole = batch.share(pace.loop.seat)
    if _cuts(whole, batch):
        return batches.Given(layers.part(whole, rows), float(rows))
    batch.expect(lambda *_: whole)
    return batch


def _cuts(rows: Any, batch: Any) -> bool:
    """Whether fewer of a batch's rows are fewer of its samples."""
    try:
        return batches_.divisible(rows, getattr(batch, "held", None)) > 0
    except ValueError:
        return False


def _facts(pace: Any, batch: Any) -> profiler.Examined:
    job, start = pace.job, time.perf_counter()
    rows = batch.share(pace.loop.seat)
    input_s = time.perf_counter() - start
    forward = job.forward or batches_.call

    def compute(rows: Any) -> torch.Tensor:
        value, times, weight, _ = batches_.judged(job.loss, forward(job.model, rows), rows)
        return value * (times / weight)

    return profiler.Examined(
        job.model,
        job.optimizer,
        pace.engine,
        compute,
        rows,
        int(batch.weight),
        job.batch_size,
        pace.asked_epochs * (getattr(batch, "num_steps", 0) or 0),
        job.clip,
        input_s,
        division(job.optimizer),
        lambda rows, passes: json.loads(timeline.record(pace.engine, job.model, rows, passes).to_json()),
        job.accumulate,
        job.precision,
        job.batch_norm,
        _ways(pace),
        _cuts(rows, batch),
    )


def _ways(pace: Any) -> dict[str, Any]:
    """How what is recorded would travel between nodes that compute as this one does."""
    exchange, numel = pace.exchange, sum(spec.numel for spec in pace.engine.specs)
    period, weights = getattr(exchange, "period", 0), pace.engine.weights[0].dtype
    wide = PRECISION[pace.engine.numerics.precision] or weights
    codec = getattr(exchange, "codec", None)
    everyones = pace.job.batch_norm == "sync"
    norms = [getattr(m, "num_features", 0) for m in over_batches(pace.job.model).values() if everyones]
    return {
        "factors": exchange.factors,
        "dense_bytes": codec.payload_bytes(numel, weights) / numel if codec else 0.0,
        "factor_bytes": wide.itemsize,
        "gathers": exchange.gathers or bool(codec and not codec.sums),
        "every": period,
        "forward": exchange.overlap == "forward",
        "loses": bool(codec and codec.fidelity == "approximate"),
        "norm_sums": 2 * len(norms) * pace.job.accumulate + bool(norms),  # forward and backward, and who has rows
        "norm_numel": 4 * sum(norms) * pace.job.accumulate,
    }
