"""What this job would send with each exchange and codec, and what a codec computes for it; or why it cannot have it.

A codec is timed on buckets of this job, small ones first, until they have ENOUGH values; a second node's replies are
its own. A codec that biases a sum is under ``feedback``. Codecs around others are left out: what ``lossless`` makes
smaller, an all-reduce measures by itself.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.engine.checks.join_arguments import clashes
from paceline.engine.checks.norm_layers import over_batches
from paceline.engine.compute.gradient_hooks import cut
from paceline.engine.compute.precision import PRECISION
from paceline.messages import ALL_GATHER, REDUCE_SCATTER, Bucket, Collective, ExchangeTraffic, StepContext
from paceline.planner.methods import FIDELITIES, MANY, MeasuredMethod
from paceline.registry import ALONE, CODEC, CORRECTION, EXCHANGE, ROOMS, module, names, parse, says
from paceline.step.run_state import RunState

ENOUGH = 1 << 22


def measure(run: RunState, engine: str) -> list[dict[str, Any]]:
    """The run's own method first. ``engine``: the configuration that is planned, which this process need not have."""
    fidelity, most = _fidelity(run.exchange, run.codec), _most_nodes(run, run.codec)
    own = MeasuredMethod(*run.asked, fidelity, of_run(run), chosen=True, most_nodes=most)
    return [asdict(each) for each in (own, *(_method(run, engine, *pair) for pair in _pairs() if pair != run.asked))]


def of_run(run: RunState) -> ExchangeTraffic:
    """Of this run's own exchange between equal nodes."""
    traffic = _whole(run, run.exchange.traffic(_type(run)))
    try:
        return replace(traffic, coding_s=_coding_s(run, run.codec))
    except Exception:  # another package's may ask more of the replies; the plan can do without its seconds
        return traffic


def _fidelity(exchange: contract.Exchange, codec: contract.Codec) -> str:
    """The lesser one of both."""
    known = [each for each in (exchange.fidelity, codec.fidelity) if each in FIDELITIES]
    return max(known, key=FIDELITIES.index, default=FIDELITIES[-1])


def _type(run: RunState) -> torch.dtype:
    return run.engine.weights[0].dtype


def _whole(run: RunState, traffic: ExchangeTraffic) -> ExchangeTraffic:
    """With what a step sends in any case."""
    wide = PRECISION[run.engine.precision] or _type(run)
    synchronised = run.job.batch_norm == "sync"
    norms = [getattr(m, "num_features", 0) for m in over_batches(run.job.model).values() if synchronised]
    return replace(
        traffic,
        factor_bytes=wide.itemsize,
        norm_sums=2 * len(norms) * run.job.accumulate + bool(norms),  # and whether nodes have samples
        norm_numel=4 * sum(norms) * run.job.accumulate,
    )


def _pairs() -> Iterator[tuple[str, str]]:
    """Each exchange without compression, and each codec with the default exchange."""
    yield from ((exchange, CODEC) for exchange in names("exchange"))
    for codec in names("codec"):
        if codec != CODEC and "inner" not in inspect.signature(_maker("codec", codec)).parameters:
            yield EXCHANGE, f"{CORRECTION}/{codec}" if says("codec", codec, "needs_feedback") else codec


def _maker(room: str, name: str) -> Any:
    return getattr(module(room, name), ROOMS[room])


def _method(run: RunState, engine: str, exchange_name: str, codec_name: str) -> MeasuredMethod:
    made = MeasuredMethod(exchange_name, codec_name)
    try:
        exchange, codec = parse("exchange", exchange_name), parse("codec", codec_name)
        if (overlap := run.exchange.overlap) not in exchange.overlaps:
            raise ValueError(f"exchange {exchange_name!r} has no overlap={overlap!r}, which the job asks for")
        exchange.overlap = overlap
        against = clashes(
            run.world,
            engine,
            run.engine.precision,
            exchange,
            exchange_name,
            codec_name,
            codec,
            run.job.buffers,
            run.engine.num_virtual_shards,
            run.job.batch_norm,
        )
        if against:
            raise ValueError(against[0])
        exchange.open(run.engine, module("link", ALONE).world(1)[0], codec, run.job.batch_size, run.job.seed)
        traffic = _whole(run, exchange.traffic(_type(run)))
        exchange.close()
        traffic = replace(traffic, coding_s=_coding_s(run, codec), rounds=_rounds(run, exchange, codec))
        return replace(made, fidelity=_fidelity(exchange, codec), traffic=traffic, most_nodes=_most_nodes(run, codec))
    except ValueError as error:
        return replace(made, refused=str(error).partition("\n")[0])
    except Exception as error:  # another package's may raise anything; the plan can do without it
        return replace(made, refused=f"{type(error).__name__}: {error}".partition("\n")[0])


def _rounds(run: RunState, exchange: contract.Exchange, codec: contract.Codec) -> float:
    """Collectives per bucket of the job, whose own codec may have larger ones than this."""
    its, _ = cut(run.job.model, True, (codec.bucket_bytes, 0 if exchange.factors else codec.bucket_bytes))
    rounds = (len(codec.rounds(bucket, 3, _type(run))) if exchange.uses_codec else 1 for bucket in its)
    return sum(rounds) / len(run.engine.buckets)


def _most_nodes(run: RunState, codec: contract.Codec) -> int:
    """Among how many it can be used; at least MANY, if MANY."""
    for size in range(2, MANY + 1):
        try:
            codec.rounds(run.engine.buckets[0], size, _type(run))
        except Exception:  # another package's may raise anything
            return size - 1
    return MANY


def _coding_s(run: RunState, codec: contract.Codec) -> float:
    """Seconds per value; 0 where nothing is encoded."""
    if isinstance(codec, _maker("codec", CODEC)):
        return 0.0
    spent_s, count = 0.0, 0
    for bucket in map(_small, sorted(run.engine.buckets, key=lambda each: each.numel)):
        values = torch.randn(bucket.numel, dtype=_type(run), device=run.engine.weights[0].device)
        spent_s += min(_run_s(codec, bucket, values) for _ in range(2))
        count += bucket.numel
        if count >= ENOUGH:
            break
    return spent_s / count if count else 0.0


def _small(bucket: Bucket) -> Bucket:
    """Some rows of its first weight, where it is so large that a codec might need more memory than there is."""
    if bucket.numel <= 2 * ENOUGH:
        return bucket
    rows, *others = bucket.shapes[0]
    shape = (max(1, min(rows, ENOUGH // max(1, math.prod(others)))), *others)
    return replace(bucket, names=bucket.names[:1], shapes=(shape,))


def _run_s(codec: contract.Codec, bucket: Bucket, values: Tensor) -> float:
    state, values = codec.init(bucket, 0), values.clone()
    _wait(values)
    start = time.perf_counter()
    run, reply = codec.run(bucket, values, state, StepContext(0, 0, 2)), None
    try:
        while True:
            reply = _reply(run.send(reply))
    except StopIteration:
        _wait(values)
        return time.perf_counter() - start


def _reply(collective: Collective) -> Any:
    payload = collective.payload
    if collective.operation == ALL_GATHER:
        return [payload, payload]
    return payload.chunk(2)[0] if collective.operation == REDUCE_SCATTER else payload


def _wait(values: Tensor) -> None:
    if values.device.type != "cpu":
        torch.accelerator.synchronize(values.device)
