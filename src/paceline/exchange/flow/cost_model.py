"""Communication cost of a layer as factors or dense: in bytes until link and multiplication are measured, then seconds.

    dense      a sum: on gloo's ring 2 (N - 1) messages, 2 (N - 1) / N n bytes
    factors    a gather: 2 (N - 1) messages, (N - 1) rows (in + out) numbers, and all other ranks' rows to multiply

The link reports what a sum and a gather cost: another collective, or MPI, costs otherwise.

Time on the wire counts in full, also where backward hides it: on a machine whose cores are busy, sending takes from
computing. A form is left only for one that saves much more than measurements swing.
*Source*: the choice by bytes: Zhang et al. 2017 (arXiv 1706.03292), section 3.2.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.messages import DENSE, FACTORS, Bucket, CommCost
from paceline.transport import Link

SAVES_S = 2e-3  # of a step: less is not worth another form
SAVES = 0.2  # of what the layer costs
TRIAL_FLOPS = 1 << 26
COUNT_BYTES = 8  # of a rank's number of rows

CostFunction = Callable[[str, int], CommCost]  # what a link asks for an operation on so many bytes


@dataclass(frozen=True)
class Rates:
    """*Units*: seconds per message, per byte, per floating-point operation of a rebuilt gradient."""

    latency: float
    per_byte: float
    per_flop: float

    def seconds(self, cost: CommCost) -> float:
        return cost.steps * self.latency + cost.in_sequence * self.per_byte + cost.flops * self.per_flop


def ring(size: int) -> CostFunction:
    """As gloo does it."""

    def cost(operation: str, num_bytes: int) -> CommCost:
        if operation == "sum":
            return CommCost(2 * (size - 1), 2 * (size - 1) / size * num_bytes)
        return CommCost(size - 1, (size - 1) * num_bytes)

    return cost


def cost_of(link: Link, size: int) -> CostFunction:
    """The link's own; of another number of ranks it says nothing, and a ring is assumed."""
    return link.cost if link.size == size else ring(size)


def dense_cost(bucket: Bucket, size: int, asks: CostFunction | None = None) -> CommCost:
    """Of 4 bytes per value."""
    return summed(4 * bucket.numel, size, asks)


def summed(num_bytes: int, size: int, asks: CostFunction | None = None) -> CommCost:
    # the additions are in what a byte takes
    return replace((asks or ring(size))("sum", num_bytes), flops=0.0)


def gathered(num_bytes: int, size: int, asks: CostFunction | None = None) -> CommCost:
    """``num_bytes``: of each rank. Its number of rows goes before them."""
    asks = asks or ring(size)
    rows = asks("all-gather", num_bytes)
    return replace(rows, steps=asks("all-gather", COUNT_BYTES).steps + rows.steps)


def factor_cost(bucket: Bucket, rows: int, size: int, itemsize: int = 4, asks: CostFunction | None = None) -> CommCost:
    """``rows``: the most that any rank sends. The flops are those beyond the rank's own rows."""
    sent = gathered(rows * sum(bucket.shapes[0]) * itemsize, size, asks)
    return CommCost(sent.steps, sent.bytes, 2.0 * rows * (size - 1) * bucket.numel)


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
    asks: CostFunction | None = None,
) -> list[str]:
    """Factors where all ranks' rows fit in the gradient's place, and pay: by fewer bytes than the sum, or, where
    nothing is sent, by an optimizer that absorbs them. With ``rates``: by fewer seconds, where that is clear; else as
    it is ``now``. ``costs``: of a dense bucket and of its factors, by codec and type; ``asks``: the link's."""

    def form(bucket: Bucket) -> str:
        if not (bucket.linear and bucket.index not in never and bucket.fits(total[bucket.index])):
            return DENSE
        if size == 1:
            return FACTORS if optimizer_takes_factors else DENSE
        whole, factors = dense_cost(bucket, size, asks=asks), factor_cost(bucket, most[bucket.index], size, asks=asks)
        if rates:
            whole, factors = costs(bucket) if costs else (whole, factors)
            gain = rates.seconds(whole) - rates.seconds(factors)
            if abs(gain) > max(SAVES_S, SAVES * max(rates.seconds(whole), rates.seconds(factors))):
                return FACTORS if gain > 0 else DENSE
        if now:
            return now[bucket.index]
        return FACTORS if factors.bytes < whole.bytes else DENSE

    return [form(bucket) for bucket in buckets]


def reason(bucket: Bucket, form: str, total: int, stray: bool, whole: CommCost, factors: CommCost, rates: Rates) -> str:
    """Why this layer travels so, in a line. ``whole``, ``factors``: what either form costs."""
    name = bucket.names[0]
    if stray:
        return f"{name}: dense, since its factors are not its whole gradient"
    if not bucket.fits(total):
        return f"{name}: dense, since factors of {total} rows would be larger than the gradient"
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
    """Seconds per floating-point operation of adding ``rows`` to a gradient of this shape, by trial on a part of it."""
    rows = max(1, rows)
    out_features, in_features = bucket.shapes[0]
    slab = max(1, min(out_features, TRIAL_FLOPS // (2 * rows * in_features)))
    left = torch.ones(slab, rows, dtype=dtype, device=device)
    right = torch.ones(rows, in_features, dtype=dtype, device=device)
    into = torch.zeros(slab, in_features, dtype=dtype, device=device)

    def once() -> float:
        start = time.perf_counter()
        multiply(into, left, right)
        float(into[0, 0])  # a device has then done it
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(3)) / (2.0 * slab * rows * in_features)
