"""Autotuner of each bucket's form and of the send order, from the votes alone: all ranks make the same choice.

first step     forms by bytes: before it for the expected number of rows, after it for the actual number
each step      the vote reports how long messages took and when buckets were ready; medians over a few steps
three steps    in a row for which other forms are faster: these are used from the next step on
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.contract import Codec
from paceline.exchange.flow import cost_model, send_order
from paceline.exchange.flow.cost_model import Rates, choose, product, rounds_cost
from paceline.exchange.flow.costs import SLOW_S, CostFunction, gathered, summed
from paceline.exchange.flow.wire_rates import LARGE_BYTES, SPAN, WireRates
from paceline.messages import DENSE, FACTORS, Bucket, CommCost, Round, Vote

FORMS = ("measured", "bytes", DENSE, FACTORS)
PACKED = ("measured", "always", "never")
HIGH_BANDWIDTH_S = 6e-9  # per byte (1.3 Gbit/s): on a faster network, copies take most of a gather's time
MIN_STEPS_IN_A_ROW = 3  # for which other forms must be faster


class Autotuner:
    """``requested``: one of `FORMS`. ``rows``: the largest number that a rank is expected to compute per step.

    ``by_need``: buckets are sent in the order in which forward reads them, else in that of backward. ``types``, per
    bucket: (dtype, device) of the gradients. ``codecs``: by the kind of a bucket.
    ``link_cost``: the link's cost function; None: that of a ring.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        size: int,
        codecs: Mapping[str, Codec],
        requested: str,
        rows: int,
        optimizer_takes_factors: bool,
        by_need: bool,
        packing: str = "measured",
        link_cost: CostFunction | None = None,
    ):
        self.buckets, self.size, self.codecs, self.requested = buckets, size, codecs, requested
        self.optimizer_takes_factors, self.by_need, self.packing = optimizer_takes_factors, by_need, packing
        self.types = [(torch.float32, torch.device("cpu"))] * len(buckets)
        self.never = {bucket.index for bucket in buckets if not bucket.linear}
        self.most, self.total = [rows] * len(buckets), [rows * size] * len(buckets)  # that the forms are chosen for
        self.multiply, self.num_multipliers = 0.0, 1
        self.multiply_by: Callable[[Tensor, Tensor, Tensor], Any] = Tensor.addmm_
        self.begin(size, link_cost)
        self.owing = set[int]()
        self.forms = self._choose()
        self._note_residuals()
        self._explain()

    def begin(self, size: int, link_cost: CostFunction | None) -> None:
        """Resets all measurements: with other ranks they do not hold."""
        self.link_cost = link_cost
        self.size, self.seen, self._steps_in_a_row, self._num_steps = size, False, 0, 0
        self.wire, self.rates, self.packed = WireRates(), Rates(0.0, 0.0, 0.0), self.packing == "always"
        self.high_bandwidth = False
        self.left = [1.0] * len(self.buckets)  # the packed share of each bucket's bytes in its last message
        self._ready: deque[tuple[float, ...]] = deque(maxlen=SPAN)
        self.groups: send_order.Groups = tuple((bucket.index,) for bucket in self.buckets)

    def restart(self, size: int, link_cost: CostFunction | None = None) -> None:
        """After a membership change: chooses from data that is equal on all ranks, not from shares or measurements."""
        self.begin(size, link_cost)
        self.most = [math.ceil(rows / size) for rows in self.total]
        self._adopt(self._choose())

    def both(self, bucket: Bucket) -> tuple[CommCost, CommCost]:
        """The costs dense, as encoded by the codec, and as factors of the expected number of rows."""
        whole = self._whole([bucket.index])
        factors = self._factors(bucket, self.most[bucket.index]) if bucket.linear else whole
        return whole, factors

    def _whole(self, group: Sequence[int]) -> CommCost:
        """The cost of these buckets in one message: their codecs have the same rounds."""
        each = zip(*map(self._rounds, group), strict=True)
        rounds = [Round(one[0].operation, sum(r.max_bytes for r in one), one[0].even) for one in each]
        return rounds_cost(rounds, self.size, self.link_cost)

    def _rounds(self, index: int) -> Sequence[Round]:
        return self.codecs[DENSE].rounds(self.buckets[index], self.size, self.types[index][0])

    def _factors(self, bucket: Bucket, rows: int) -> CommCost:
        rounds = self.codecs[FACTORS].rounds(bucket.as_factors(rows), self.size, self.types[bucket.index][0])
        return rounds_cost(rounds, self.size, self.link_cost) + product(bucket, rows, self.size)

    def gathered(self, num_bytes: int) -> CommCost:
        """The cost of an all-gather of ``num_bytes`` of each rank."""
        return gathered(num_bytes, self.size, self.link_cost)

    def costs(self, groups: Sequence[Sequence[int]], most: Sequence[int]) -> list[CommCost]:
        """The cost of each message, at the index of its first bucket. ``most``: rows of the busiest rank."""
        costs = [CommCost(0, 0)] * len(self.buckets)
        for group in groups:
            first = self.buckets[group[0]]
            if self.forms[first.index] == FACTORS:
                costs[first.index] = self._factors(first, most[first.index])
            else:
                costs[first.index] = self._whole(group)
        return costs

    def multiplication(self) -> float:
        """Measured once, when the first step has shown the number of rows; 0 before, or where no layer needs it."""
        possible = [s for s in self.buckets if s.index not in self.never and s.fits(self.total[s.index])]
        if self.requested == "measured" and self.seen and not self.multiply and possible:
            largest = max(possible, key=lambda bucket: bucket.numel)
            rows, kind = self.total[largest.index], self.types[largest.index]
            self.multiply = cost_model.multiplication(largest, rows, *kind, self.multiply_by) / self.num_multipliers
        return self.multiply

    def learn(self, merged: Vote, costs: Sequence[CommCost]) -> None:
        """Rates and send order from all ranks' measurements. ``costs``: of the messages whose times are in
        ``merged.took``."""
        self.wire.saw(list(zip(costs, merged.took, strict=False)))
        self._ready.append(merged.ready)
        self._num_steps += 1
        if not self.wire.known:
            return
        first = not self.rates.per_byte
        self.rates = Rates(self.wire.latency, self.wire.per_byte, merged.multiply)
        self.high_bandwidth = self.rates.per_byte < HIGH_BANDWIDTH_S * (1.25 if self.high_bandwidth else 1)
        if self.packing == "measured":
            # hysteresis: packing ends only on a network that is twice as fast
            slow = self.rates.per_byte >= SLOW_S / (2 if self.packed else 1)
            # the time of small messages is latency: it says nothing about the time per byte
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
        rounds = [self._rounds(bucket.index) for bucket in self.buckets]
        payloads = [sum(r.max_bytes for r in each) for each in rounds]
        joinable = [form == DENSE and all(r.even for r in rounds[i]) for i, form in enumerate(self.forms)]
        likes = [str((self.types[i], [r.operation for r in each])) for i, each in enumerate(rounds)]
        kinds = [like if can else "" for like, can in zip(likes, joinable, strict=True)]
        message_s = summed(4 * self.size, self.size, self.link_cost).steps * self.rates.latency
        if len(order) * message_s < send_order.NOTICED * sum(seconds):
            message_s = 0.0
        return send_order.merged(order, ready, seconds, payloads, kinds, message_s, self.by_need)

    def needs_retry(self, merged: Vote, votes: Sequence[Vote]) -> bool:
        """True if the step must be retried: factors were not the whole gradient, or did not fit in its memory."""
        impure = {i for i, dense in enumerate(merged.dense) if dense}
        # factors need memory where they are sent between nodes, or between a node's processes
        for bucket in self.buckets if self.size > 1 or self.num_multipliers > 1 else ():
            if self.forms[bucket.index] == FACTORS and not bucket.fits(merged.rows[bucket.index]):
                impure.add(bucket.index)
        self.never |= impure
        if not self.seen or impure:
            self.most = [max(vote.rows[bucket.index] for vote in votes) for bucket in self.buckets]
            self.total = list(merged.rows)
            self._adopt(self._choose(self.forms if self.seen else ()))
            self.seen = self.seen or merged.ok
        elif self.size > 1:
            wanted = self._choose(self.forms)
            self._steps_in_a_row = self._steps_in_a_row + 1 if wanted != self.forms else 0
            if self._steps_in_a_row >= MIN_STEPS_IN_A_ROW:
                self._adopt(wanted)
        return bool(impure)

    def on_assignment(self, largest: float) -> None:
        """From now on the busiest rank has the share ``largest`` of all rows."""
        if self.seen:
            self.most = [math.ceil(rows * largest) for rows in self.total]
            self._adopt(self._choose())

    def _choose(self, now: Sequence[str] = ()) -> list[str]:
        if self.requested in (DENSE, FACTORS) and self.size > 1:
            possible = (s.index not in self.never | self.owing and s.fits(self.total[s.index]) for s in self.buckets)
            return [self.requested if each else DENSE for each in possible]
        measured = self.requested == "measured" and self.rates.per_byte and self.rates.per_flop
        rates = self.rates if measured else None
        return choose(
            *(self.buckets, self.most, self.total, self.size, self.never | self.owing, self.optimizer_takes_factors),
            *(rates, now, self._uncompressed, self.link_cost),
        )

    def _uncompressed(self, bucket: Bucket) -> tuple[CommCost, CommCost]:
        """As `both`, but with the bytes before a lossy codec: it must not win against factors, which are exact."""
        whole, factors = self.both(bucket)
        if self.codecs[DENSE].fidelity == "approximate":
            whole = summed(bucket.numel * self.types[bucket.index][0].itemsize, self.size, self.link_cost)
        return whole, factors

    def _adopt(self, forms: list[str]) -> None:
        self._steps_in_a_row = 0
        if forms != self.forms:
            self.groups = tuple((index,) for group in self.groups for index in group)
        self.forms = forms
        self._note_residuals()
        self._explain()

    def keep_dense(self, indices: Sequence[int]) -> None:
        """These buckets have a residual from a checkpoint of another configuration: they stay dense from now on."""
        self.owing |= set(indices)
        self._adopt(self._choose())

    def _note_residuals(self) -> None:
        """A bucket that was sent dense may have an error-feedback residual, which would never be sent with factors."""
        if self.codecs[DENSE].has_residual and self.size > 1:
            self.owing |= {bucket.index for bucket in self.buckets if self.forms[bucket.index] == DENSE}

    def _explain(self) -> None:
        self.why = [
            cost_model.reason(bucket, self.forms[i], self.total[i], i in self.never, *self.both(bucket), self.rates)
            for i, bucket in enumerate(self.buckets)
            if bucket.linear and self.size > 1
        ]

    def state(self) -> dict[str, Any]:
        groups = [list(group) for group in self.groups]
        choice = {"forms": list(self.forms), "never": sorted(self.never), "seen": self.seen, "groups": groups}
        return {**choice, "owing": sorted(self.owing), "most": list(self.most), "total": list(self.total)}

    def load(self, state: dict[str, Any]) -> None:
        self.forms, self.never, self.seen = list(state["forms"]), set(state["never"]), state["seen"]
        self.owing = set(state.get("owing", ()))
        self.total = list(state.get("total") or self.total)
        self.most = list(state.get("most") or self.most)
        self.groups = tuple(map(tuple, state.get("groups") or self.groups))
        self._explain()
