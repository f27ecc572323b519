"""Autotuner of each bucket's form and of the send order: chosen from the votes, so all ranks choose alike.

first step       by bytes, for the rows that are expected; then for those that there were
each step        the vote reports how long messages took and when buckets were ready; medians over a few steps
three steps      that ask for the same other forms, and they hold from the next step on
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.codec.lossless import SLOW_S
from paceline.contract import Codec
from paceline.exchange.flow import cost_model, send_order
from paceline.exchange.flow.cost_model import CostFunction, Rates, choose, factor_cost, gathered, summed
from paceline.exchange.flow.wire_rates import LARGE_BYTES, SPAN, WireRates
from paceline.messages import DENSE, FACTORS, Bucket, CommCost, Vote

ASKED = ("measured", "bytes", DENSE, FACTORS)
PACKED = ("measured", "always", "never")
QUICK_S = 6e-9  # per byte: of a wire on which copies are what a gather takes, 1.3 Gbit/s
MIN_STEPS_IN_A_ROW = 3  # steps, one after the other, that must ask for the same other forms


class Autotuner:
    """``requested``: one of `ASKED`. ``rows``: the largest number that a rank is expected to compute per step.

    ``by_need``: whether the order is that in which forward reads, or that in which backward writes. ``types``, per
    bucket: of the gradients as they were offered; ``thin``: of factors on the wire, where that is another. ``asks``:
    the link's own cost of an operation; None: a ring's.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        size: int,
        codec: Codec,
        requested: str,
        rows: int,
        optimizer_takes_factors: bool,
        by_need: bool,
        thin: torch.dtype | None = None,
        packing: str = "measured",
        asks: CostFunction | None = None,
    ):
        self.buckets, self.size, self.codec, self.requested = buckets, size, codec, requested
        self.optimizer_takes_factors, self.by_need = optimizer_takes_factors, by_need
        self.factor_dtype, self.packing = thin, packing
        self.types = [(torch.float32, torch.device("cpu"))] * len(buckets)
        self.never = {bucket.index for bucket in buckets if not bucket.linear}
        self.most, self.total = [rows] * len(buckets), [rows * size] * len(buckets)  # that the forms are chosen for
        self.multiply, self.num_multipliers = 0.0, 1
        self.multiply_by: Callable[[Tensor, Tensor, Tensor], Any] = Tensor.addmm_
        self.begin(size, asks)
        self.owing = set[int]()
        self.forms = self._choose()
        self._owe()
        self._explain()

    def begin(self, size: int, asks: CostFunction | None) -> None:
        """Among other ranks all is measured anew."""
        self.asks = asks
        self.size, self.seen, self._asks, self._num_steps = size, False, 0, 0
        self.wire, self.rates, self.packed = WireRates(), Rates(0.0, 0.0, 0.0), self.packing == "always"
        self.high_bandwidth = False
        self.left = [1.0] * len(self.buckets)  # of each bucket's bytes, as it was last sent
        self._ready: deque[tuple[float, ...]] = deque(maxlen=SPAN)
        self.groups: send_order.Groups = tuple((bucket.index,) for bucket in self.buckets)

    def anew(self, size: int, asks: CostFunction | None = None) -> None:
        """After a membership change: from what all ranks have received alike, so not from shares or measurements."""
        self.begin(size, asks)
        self.most = [math.ceil(rows / size) for rows in self.total]
        self._adopt(self._choose())

    def both(self, bucket: Bucket) -> tuple[CommCost, CommCost]:
        """What it costs dense, as its codec makes it, and as factors of the rows that are expected."""
        whole = self._whole(self._payload(bucket.index))
        factors = self._factors(bucket, self.most[bucket.index]) if bucket.linear else whole
        return whole, factors

    def _whole(self, payload: int) -> CommCost:
        return (summed if self.codec.sums else gathered)(payload, self.size, self.asks)

    def _factors(self, bucket: Bucket, rows: int) -> CommCost:
        itemsize = (self.factor_dtype or self.types[bucket.index][0]).itemsize
        return factor_cost(bucket, rows, self.size, itemsize, self.asks)

    def _payload(self, index: int) -> int:
        return self.codec.payload_bytes(self.buckets[index].numel, self.types[index][0])

    def gathered(self, num_bytes: int) -> CommCost:
        """Of so many bytes of each rank, in place of whatever would have been sent."""
        return gathered(num_bytes, self.size, self.asks)

    def costs(self, groups: Sequence[Sequence[int]], most: Sequence[int]) -> list[CommCost]:
        """Of each message, in the place of its first bucket. ``most``: rows of any rank."""
        costs = [CommCost(0, 0)] * len(self.buckets)
        for group in groups:
            first = self.buckets[group[0]]
            if self.forms[first.index] == FACTORS:
                costs[first.index] = self._factors(first, most[first.index])
            else:
                costs[first.index] = self._whole(sum(map(self._payload, group)))
        return costs

    def multiplication(self) -> float:
        """Tried once, when the first step has shown how many rows there are; 0 before, or where no layer asks."""
        possible = [s for s in self.buckets if s.index not in self.never and s.fits(self.total[s.index])]
        if self.requested == "measured" and self.seen and not self.multiply and possible:
            largest = max(possible, key=lambda bucket: bucket.numel)
            rows, kind = self.total[largest.index], self.types[largest.index]
            self.multiply = cost_model.multiplication(largest, rows, *kind, self.multiply_by) / self.num_multipliers
        return self.multiply

    def learn(self, merged: Vote, costs: Sequence[CommCost]) -> None:
        """Rates and order from what all have measured. ``costs``: of the messages that ``merged.took`` speaks of."""
        self.wire.saw(list(zip(costs, merged.took, strict=False)))
        self._ready.append(merged.ready)
        self._num_steps += 1
        if not self.wire.known:
            return
        first = not self.rates.per_byte
        self.rates = Rates(self.wire.latency, self.wire.per_byte, merged.multiply)
        self.high_bandwidth = self.rates.per_byte < QUICK_S * (1.25 if self.high_bandwidth else 1)
        if self.packing == "measured":
            # once begun, only a wire that is much faster ends it
            slow = self.rates.per_byte >= SLOW_S / (2 if self.packed else 1)
            # small messages take what a message takes: of the wire's bytes they tell nothing
            self.packed = slow and any(cost.bytes >= LARGE_BYTES for cost in self.costs(self.groups, self.most))
        if first:
            self._explain()
        if first or self._num_steps % SPAN == 0:
            self.groups = self._order()

    def _order(self) -> send_order.Groups:
        single = self.costs([(bucket.index,) for bucket in self.buckets], self.most)
        num_bytes = [cost.in_sequence * left for cost, left in zip(single, self.left, strict=True)]
        pairs = zip(single, num_bytes, strict=True)
        seconds = [cost.steps * self.rates.latency + n * self.rates.per_byte for cost, n in pairs]
        ready = [statistics.median(column) for column in zip(*self._ready, strict=True)]
        order = send_order.by_need(ready, seconds) if self.by_need else list(range(len(self.buckets)))
        payloads = [self._payload(bucket.index) for bucket in self.buckets]
        joinable = [self.codec.sums and form == DENSE for form in self.forms]
        kinds = [str(self.types[i]) if can else "" for i, can in enumerate(joinable)]
        message_s = summed(4 * self.size, self.size, self.asks).steps * self.rates.latency
        if len(order) * message_s < send_order.NOTICED * sum(seconds):
            message_s = 0.0
        return send_order.merged(order, ready, seconds, payloads, kinds, message_s, self.by_need)

    def needs_retry(self, merged: Vote, votes: Sequence[Vote]) -> bool:
        """True if the step must be redone: factors were not a whole gradient, or more than its place holds."""
        strays = {i for i, dense in enumerate(merged.dense) if dense}
        # where factors have a place, on the wire or among a node's processes
        for bucket in self.buckets if self.size > 1 or self.num_multipliers > 1 else ():
            if self.forms[bucket.index] == FACTORS and not bucket.fits(merged.rows[bucket.index]):
                strays.add(bucket.index)
        self.never |= strays
        if not self.seen or strays:
            self.most = [max(vote.rows[bucket.index] for vote in votes) for bucket in self.buckets]
            self.total = list(merged.rows)
            self._adopt(self._choose(self.forms if self.seen else ()))
            self.seen = self.seen or merged.ok
        elif self.size > 1:
            wanted = self._choose(self.forms)
            self._asks = self._asks + 1 if wanted != self.forms else 0
            if self._asks >= MIN_STEPS_IN_A_ROW:
                self._adopt(wanted)
        return bool(strays)

    def on_assignment(self, largest: float) -> None:
        """The busiest rank has this part of all rows."""
        if self.seen:
            self.most = [math.ceil(rows * largest) for rows in self.total]
            self._adopt(self._choose())

    def _choose(self, now: Sequence[str] = ()) -> list[str]:
        if self.requested in (DENSE, FACTORS) and self.size > 1:
            possible = (s.index not in self.never | self.owing and s.fits(self.total[s.index]) for s in self.buckets)
            return [self.requested if here else DENSE for here in possible]
        measured = self.requested == "measured" and self.rates.per_byte and self.rates.per_flop
        rates = self.rates if measured else None
        return choose(
            *(self.buckets, self.most, self.total, self.size, self.never | self.owing, self.optimizer_takes_factors),
            *(rates, now, self._fairly, self.asks),
        )

    def _fairly(self, bucket: Bucket) -> tuple[CommCost, CommCost]:
        """As `both`, but a codec that loses something does not win against factors that lose nothing."""
        whole, factors = self.both(bucket)
        if self.codec.fidelity == "approximate":
            whole = summed(bucket.numel * self.types[bucket.index][0].itemsize, self.size, self.asks)
        return whole, factors

    def _adopt(self, forms: list[str]) -> None:
        self._asks = 0
        if forms != self.forms:
            self.groups = tuple((index,) for group in self.groups for index in group)
        self.forms = forms
        self._owe()
        self._explain()

    def keep_dense(self, indices: Sequence[int]) -> None:
        """What a checkpoint of another plan says that its codec still owes goes dense until the end."""
        self.owing |= set(indices)
        self._adopt(self._choose())

    def _owe(self) -> None:
        """What was sent dense once may owe something, which as factors it would never send."""
        if self.codec.has_residual and self.size > 1:
            self.owing |= {bucket.index for bucket in self.buckets if self.forms[bucket.index] == DENSE}

    def _explain(self) -> None:
        self.why = [
            cost_model.reason(bucket, self.forms[i], self.total[i], i in self.never, *self.both(bucket), self.rates)
            for i, bucket in enumerate(self.buckets)
            if bucket.linear and self.size > 1
        ]

    def state(self) -> dict[str, Any]:
        groups = [list(group) for group in self.groups]
        kept = {"forms": list(self.forms), "never": sorted(self.never), "seen": self.seen, "groups": groups}
        return {**kept, "owing": sorted(self.owing), "most": list(self.most), "total": list(self.total)}

    def load(self, state: dict[str, Any]) -> None:
        self.forms, self.never, self.seen = list(state["forms"]), set(state["never"]), state["seen"]
        self.owing = set(state.get("owing", ()))
        self.total = list(state.get("total") or self.total)
        self.most = list(state.get("most") or self.most)
        self.groups = tuple(map(tuple, state.get("groups") or self.groups))
        self._explain()
