"""Communication cost of a layer as factors or dense: in bytes until link and multiplication are measured, then seconds.

    dense      an all-reduce
    factors    an all-gather of rows (in + out) numbers, and all other ranks' rows to multiply

What these send: `flow/costs.py`. The time of a step on several machines: `planner/cluster_model.py`.

Time on the network counts in full, also where backward hides it: while all cores are busy, sending slows computing. A
layer changes its form only where that saves much more than the noise of the measurements.
*Source*: the choice by bytes: Zhang et al. 2017 (arXiv 1706.03292), section 3.2.
"""

from __future__ import annotations

import functools
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import contract
from paceline.exchange.flow.costs import CostFunction, clearly_differ, gathered, ring, summed
from paceline.messages import (
    ALL_GATHER,
    DENSE,
    FACTORS,
    REDUCE_SCATTER,
    SHIFT,
    Bucket,
    CommCost,
    ExchangeTraffic,
    Round,
)
from paceline.transport import Link

TRIAL_FLOPS = 1 << 26


@dataclass(frozen=True)
class Rates:
    """*Units*: seconds per message, per byte, per floating-point operation of a rebuilt gradient."""

    latency: float
    per_byte: float
    per_flop: float

    def seconds(self, cost: CommCost) -> float:
        return cost.steps * self.latency + cost.in_sequence * self.per_byte + cost.flops * self.per_flop


def cost_of(link: Link, size: int) -> CostFunction:
    """The link's own cost function; that of a ring for another number of ranks, which the link does not know."""
    return link.cost if link.size == size else ring(size)


def dense_cost(bucket: Bucket, size: int, link_cost: CostFunction | None = None) -> CommCost:
    """The cost of a sum, with 4 bytes per value."""
    return summed(4 * bucket.numel, size, link_cost)


def rounds_cost(rounds: Sequence[Round], size: int, link_cost: CostFunction | None = None) -> CommCost:
    """The cost of a codec's collectives, one after the other."""

    def cost(each: Round) -> CommCost:
        if each.operation in (REDUCE_SCATTER, SHIFT):
            return (link_cost or ring(size))(each.operation, each.max_bytes)
        if each.operation != ALL_GATHER:
            return summed(each.max_bytes, size, link_cost)
        if each.even:
            return (link_cost or ring(size))(ALL_GATHER, each.max_bytes)
        return gathered(each.max_bytes, size, link_cost)

    return functools.reduce(operator.add, map(cost, rounds))


def coded_traffic(codec: contract.Codec, buckets: Sequence[Bucket], dtype: torch.dtype) -> ExchangeTraffic:
    """What a codec sends of such buckets, dense."""
    # among three nodes: two may gather what more would sum
    rounds = [each for bucket in buckets for each in codec.rounds(bucket, 3, dtype)]
    return ExchangeTraffic(
        factors=False,
        dense_bytes=sum(each.max_bytes for each in rounds) / sum(bucket.numel for bucket in buckets),
        gathers=any(each.operation == ALL_GATHER for each in rounds),
        rounds=len(rounds) / len(buckets),
        loses=codec.fidelity == "approximate",
    )


def factor_cost(
    bucket: Bucket, rows: int, size: int, itemsize: int = 4, link_cost: CostFunction | None = None
) -> CommCost:
    """``rows``: the most that any rank sends. The flops are those of the other ranks' rows."""
    sent = gathered(rows * sum(bucket.shapes[0]) * itemsize, size, link_cost)
    return sent + product(bucket, rows, size)


def product(bucket: Bucket, rows: int, size: int) -> CommCost:
    """The cost of multiplying the factors of all other ranks, of so many rows each."""
    return CommCost(0, 0, 2.0 * rows * (size - 1) * bucket.numel)


def choose(
    buckets: Sequence[Bucket],
    most: Sequence[int],
    total: Sequence[int],
    size: int,
    never: set[int],
    optimizer_takes_factors: bool = False,
    rates: Rates | None = None,
    now: Sequence[str] = (),
    costs: Callable[[Bucket], tuple[CommCost, CommCost]] | None = None,
    link_cost: CostFunction | None = None,
) -> list[str]:
    """FACTORS for each layer whose factors, of all ranks, fit in the gradient's memory and pay: by fewer bytes than the
    sum or, with one rank, where the optimizer takes factors. With ``rates``: by clearly fewer seconds; else the form in
    ``now``. ``costs``: of a bucket dense and as factors, by codec and type; ``link_cost``: the link's cost function."""

    def form(bucket: Bucket) -> str:
        if not (bucket.linear and bucket.index not in never and bucket.fits(total[bucket.index])):
            return DENSE
        if size == 1:
            return FACTORS if optimizer_takes_factors else DENSE
        whole, factors = (
            dense_cost(bucket, size, link_cost=link_cost),
            factor_cost(bucket, most[bucket.index], size, link_cost=link_cost),
        )
        if rates:
            whole, factors = costs(bucket) if costs else (whole, factors)
            whole_s, factors_s = rates.seconds(whole), rates.seconds(factors)
            if clearly_differ(whole_s, factors_s):
                return FACTORS if factors_s < whole_s else DENSE
        if now:
            return now[bucket.index]
        return FACTORS if factors.bytes < whole.bytes else DENSE

    return [form(bucket) for bucket in buckets]


def reason(bucket: Bucket, form: str, rows: int, impure: bool, whole: CommCost, factors: CommCost, rates: Rates) -> str:
    """One line: the layer's form, and why. ``whole``, ``factors``: the costs of either form."""
    name = bucket.names[0]
    if impure:
        return f"{name}: dense, since its factors are not its whole gradient"
    if not bucket.fits(rows):
        return f"{name}: dense, since factors of {rows} rows would be larger than the gradient"
    costs = f"factors {_described(factors, rates)}, dense {_described(whole, rates)}"
    if rates.per_byte:
        return f"{name}: {form}; {costs}, and {1e3 * factors.flops * rates.per_flop:.1f} ms to multiply with factors"
    return f"{name}: {form}; {costs}; nothing measured yet"


def _described(cost: CommCost, rates: Rates) -> str:
    seconds = cost.steps * rates.latency + cost.in_sequence * rates.per_byte
    return f"{cost.bytes / 1e6:.2f} MB" + (f" in {1e3 * seconds:.1f} ms" if rates.per_byte else "")


def multiplication(
    bucket: Bucket, rows: int, dtype: torch.dtype, device: torch.device, multiply: Callable[..., object] = Tensor.addmm_
) -> float:
    """Measured seconds per floating-point operation of adding ``rows`` rows of factors to a part of such a gradient."""
    rows = max(1, rows)
    out_features, in_features = bucket.shapes[0]
    slab = max(1, min(out_features, TRIAL_FLOPS // (2 * rows * in_features)))
    left = torch.ones(slab, rows, dtype=dtype, device=device)
    right = torch.ones(rows, in_features, dtype=dtype, device=device)
    into = torch.zeros(slab, in_features, dtype=dtype, device=device)

    def once() -> float:
        start = time.perf_counter()
        multiply(into, left, right)
        float(into[0, 0])  # waits for a device
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(3)) / (2.0 * slab * rows * in_features)
