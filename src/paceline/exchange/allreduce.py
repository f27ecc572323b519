"""Everyone's gradients added on the wire while backward runs; fully-connected layers as factors.

*Cost* (N ranks, n bytes dense): 2 (N - 1) / N n sent per rank on a ring; a layer sent as factors costs
(N - 1) rows (in + out) words instead of 2 (N - 1) / N in out, and each rank multiplies everyone's rows.
*Laws*: N ranks equal one process on the global batch; replicas stay bit-equal; pieces leave in one order.
*Source*: wait-free backpropagation and factors: Zhang et al. 2017 (arXiv 1706.03292), sections 3 and 4.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.contract import DENSE, FACTORS, Agreement, Ballot, Cost, LinkError, Piece, Spec, Verdict
from paceline.exchange import order
from paceline.exchange.forms import (
    Rates,
    choose,
    dense_cost,
    factor_cost,
    gathered,
    multiplication,
    reason,
    summed,
)
from paceline.exchange.lane import Flight, Lane, Sent
from paceline.exchange.meeting import Meeting
from paceline.exchange.wire import SPAN, Wire

FORMS = ("measured", "bytes", DENSE, FACTORS)
PATIENCE = 3  # steps, one after the other, that must ask for the same other forms


class Exchange(Meeting):
    """``forms``: "measured", "bytes" as long as training lasts, or always one of "dense" and "factors" where possible.

    Memory of the codec belongs to this rank and moves only when a step is applied.
    """

    overlaps = ("backward", "forward")
    _absorbs = False
    _asked = "measured"

    def __init__(self, forms: str = "measured"):
        if forms not in FORMS:
            raise ValueError(f"exchange 'allreduce': forms is one of {', '.join(FORMS)}, got {forms!r}")
        self._asked = forms

    def open(
        self,
        specs: Sequence[Spec],
        link: contract.Link,
        codec: contract.Codec,
        rows: int = 1,
        seed: int = 0,
        absorbs: bool = False,
    ) -> None:
        """``rows``: the largest number of rows that a rank computes per step, until a step has shown it."""
        self.specs, self.codec, self.link, self._absorbs = specs, codec, link, absorbs
        self.fidelity = codec.fidelity
        self.step = 0
        self.memory = {spec.index: codec.init(spec, link.rank, seed) for spec in specs}
        self._never = {spec.index for spec in specs if not spec.linear}
        self._types = [(torch.float32, torch.device("cpu"))] * len(specs)
        self._seen = False
        self._most, self._total = [rows] * len(specs), [rows * link.size] * len(specs)  # that the forms are chosen for
        self._multiply = 0.0
        self._measure_anew()
        self._forms = self._choose()
        self._explain()
        self._start()

    def _measure_anew(self) -> None:
        self._wire, self._rates, self._asks = Wire(), Rates(0.0, 0.0, 0.0), 0
        self._ready: deque[tuple[float, ...]] = deque(maxlen=SPAN)
        self._groups: order.Groups = tuple((spec.index,) for spec in self.specs)
        self._before: tuple[Flight, list[Cost]] | None = None  # the last step whose pieces came after its vote

    def _start(self) -> None:
        self._lane = self.link.lane("gradients") if self.link.size > 1 else self.link
        self._flow = Lane(self._send) if self.link.size > 1 else None
        self._flight = Flight(self._groups)

    def forms(self) -> Sequence[str]:
        return self._forms

    def why(self) -> Sequence[str]:
        return self._why

    def before(self, weights: Sequence[Tensor]) -> None:
        """A step that was interrupted in the middle of backward has left pieces behind."""
        if self._flight.offered and self.link.size > 1:
            raise LinkError("the step before was interrupted while its pieces were leaving; join again")
        self._flight = Flight(self._groups)

    def offer(self, piece: Piece) -> None:
        if self._flow:
            self._flow.offer(self._flight, piece)
        else:
            self._flight.offered[piece.spec.index] = 0.0
            self._flight.waiting[piece.spec.index] = piece

    def _send(self, pieces: Sequence[Piece]) -> Sent:
        first, spec = pieces[0], pieces[0].spec
        what = f"{', '.join(spec.names[:2])}{' ...' if len(spec.names) > 2 or len(pieces) > 1 else ''}"
        if first.left is not None and first.right is not None:
            # (rows, out + in)
            both = torch.cat([first.left, first.right.to(first.left.dtype)], dim=1)
            self._types[spec.index] = both.dtype, both.device
            what = f"all-gather of the factors of {what} ({both.nbytes / 1e6:.1f} MB)"
            begin_s = time.perf_counter()
            return Sent(pieces, self._lane.all_gather(both, what), begin_s)
        payloads, pending = [], []
        for piece in pieces:
            assert piece.flat is not None
            index = piece.spec.index
            self._types[index] = piece.flat.dtype, piece.flat.device
            payload, remembered = self.codec.encode(piece.flat, self.memory[index], self.step)
            payloads.append(payload)
            pending.append(remembered)
        payload = payloads[0] if len(payloads) == 1 else torch.cat(payloads)
        operation = self._lane.sum if self.codec.sums else self._lane.all_gather
        what = f"sum of bucket {spec.index}: {what} ({payload.nbytes / 1e6:.1f} MB)"
        begin_s = time.perf_counter()
        return Sent(pieces, operation(payload, what), begin_s, pending)

    def receive(self, flight: Flight, spec: Spec) -> tuple[Piece, Any]:
        """(what everyone's pieces come to, what the codec will remember). Waits for it; called once for each."""
        assert self._flow
        sent, place = self._flow.take(flight, spec.index)
        piece, got = sent.pieces[place], sent.result
        if piece.left is not None:
            out_features = spec.shapes[0][0]
            # rank after rank, so that every node multiplies in the same order
            both = torch.cat(got)
            return Piece(spec, left=both[:, :out_features], right=both[:, out_features:]), None
        assert piece.flat is not None
        numel, dtype, pending = spec.numel, piece.flat.dtype, sent.pending[place]
        if len(sent.pieces) > 1:
            start = sum(each.spec.numel for each in sent.pieces[:place])
            got = got[start : start + numel]
        if self.codec.sums:
            return Piece(spec, flat=self.codec.decode(got, numel, dtype)), pending
        whole = self.codec.decode(got[0], numel, dtype)
        for payload in got[1:]:
            whole += self.codec.decode(payload, numel, dtype)
        return Piece(spec, flat=whole), pending

    def remember(self, piece: Piece, pending: Any) -> None:
        if piece.flat is not None:
            self.memory[piece.spec.index] = self.codec.settle(pending, piece.flat)

    def agree(self, ballot: Ballot) -> Agreement:
        if self._flow is None:
            return self._alone(ballot)
        flight, later = self._flight, self.overlap == "forward"
        got = [] if later else [self.receive(flight, spec) for spec in self.specs]
        measured = self._before[0] if later and self._before else flight
        ballot.ready, ballot.took = flight.ready(), measured.took()
        ballot.multiply = self._multiplication()
        merged, ballots, drift = self.vote(ballot)
        coming: list[contract.Coming] = [_Coming(self, flight, self.specs[i]) for group in flight.groups for i in group]
        costs = self._costs(flight, [max(ballot.rows[spec.index] for ballot in ballots) for spec in self.specs])
        self._learn(merged, (self._before[1] if self._before else []) if later else costs)
        self._before = (flight, costs) if later else None
        redo = self._choose_again(merged, ballots)
        self._flight = Flight(self._groups)
        if not merged.ok or redo:
            for each in coming if later else ():
                each.wait()  # they lie in gradients that the step begins with again
            return Agreement(Verdict.REDO, ballot=merged, drift=drift)
        self.step += 1
        if later:
            return Agreement(Verdict.APPLY, [], merged, drift, coming)
        for piece, pending in got if merged.finite else ():
            self.remember(piece, pending)
        return Agreement(Verdict.APPLY, [piece for piece, _ in got], merged, drift)

    def _alone(self, ballot: Ballot) -> Agreement:
        pieces = [self._flight.waiting[spec.index] for spec in self.specs]
        self._flight = Flight(self._groups)
        redo = self._choose_again(ballot, [ballot]) or not ballot.ok
        return Agreement(Verdict.REDO if redo else Verdict.APPLY, [] if redo else pieces, ballot)

    # what is measured, and what follows from it

    def _both(self, spec: Spec) -> tuple[Cost, Cost]:
        """What it costs dense, as its codec makes it, and as factors of the rows that are expected."""
        dtype, size = self._types[spec.index][0], self.link.size
        payload = self.codec.payload_bytes(spec.numel, dtype)
        whole = summed(payload, size) if self.codec.sums else gathered(payload, size)
        factors = factor_cost(spec, self._most[spec.index], size, dtype.itemsize) if spec.linear else whole
        return whole, factors

    def _costs(self, flight: Flight, most: Sequence[int]) -> list[Cost]:
        """Of each message, in the place of its first spec."""
        costs = [Cost(0, 0)] * len(self.specs)
        for group in flight.groups:
            first = self.specs[group[0]]
            if self._forms[first.index] == FACTORS:
                itemsize = self._types[first.index][0].itemsize
                costs[first.index] = factor_cost(first, most[first.index], self.link.size, itemsize)
            else:
                each = [self._both(self.specs[i])[0] for i in group]
                costs[first.index] = Cost(each[0].steps, sum(cost.bytes for cost in each))
        return costs

    def _multiplication(self) -> float:
        """Tried once, when the first step has shown how many rows there are; 0 before, or where no layer asks."""
        possible = [spec for spec in self.specs if spec.index not in self._never and spec.fits(self._total[spec.index])]
        if self._asked == "measured" and self._seen and not self._multiply and possible:
            largest = max(possible, key=lambda spec: spec.numel)
            self._multiply = multiplication(largest, self._total[largest.index], *self._types[largest.index])
        return self._multiply

    def _learn(self, merged: Ballot, costs: Sequence[Cost]) -> None:
        """Rates and order from what all have measured."""
        self._wire.saw(list(zip(costs, merged.took, strict=False)))
        self._ready.append(merged.ready)
        if not self._wire.known:
            return
        first = not self._rates.per_byte
        self._rates = Rates(self._wire.latency, self._wire.per_byte, merged.multiply)
        if first:
            self._explain()
        if first or self.step % SPAN == 0:
            self._groups = self._order()

    def _order(self) -> order.Groups:
        single = self._costs(Flight([(spec.index,) for spec in self.specs]), self._most)
        seconds = [cost.steps * self._rates.latency + cost.bytes * self._rates.per_byte for cost in single]
        ready = [statistics.median(column) for column in zip(*self._ready, strict=True)]
        turns = order.by_need(ready, seconds) if self.overlap == "forward" else list(range(len(self.specs)))
        num_bytes = [self.codec.payload_bytes(s.numel, self._types[s.index][0]) for s in self.specs]
        kinds = [
            str(self._types[s.index]) if self.codec.sums and self._forms[s.index] == DENSE else "" for s in self.specs
        ]
        message_s = 2 * (self.link.size - 1) * self._rates.latency
        if len(turns) * message_s < order.NOTICED * sum(seconds):
            message_s = 0.0
        return order.merged(turns, ready, seconds, num_bytes, kinds, message_s)

    def _choose(self, now: Sequence[str] = ()) -> list[str]:
        if self._asked in (DENSE, FACTORS) and self.link.size > 1:
            possible = (s.index not in self._never and s.fits(self._total[s.index]) for s in self.specs)
            return [self._asked if here else DENSE for here in possible]
        rates = self._rates if self._asked == "measured" and self._rates.per_byte and self._rates.per_flop else None
        size = self.link.size
        return choose(self.specs, self._most, self._total, size, self._never, self._absorbs, rates, now, self._both)

    def _choose_again(self, merged: Ballot, ballots: Sequence[Ballot]) -> bool:
        """True if the step must be redone: factors were not a whole gradient, or more than its place holds."""
        strays = {i for i, dense in enumerate(merged.dense) if dense}
        for spec in self.specs if self.link.size > 1 else ():
            if self._forms[spec.index] == FACTORS and not spec.fits(merged.rows[spec.index]):
                strays.add(spec.index)
        self._never |= strays
        if not self._seen or strays:
            self._most = [max(ballot.rows[spec.index] for ballot in ballots) for spec in self.specs]
            self._total = list(merged.rows)
            self._adopt(self._choose(self._forms if self._seen else ()))
            self._seen = self._seen or merged.ok
        elif self.link.size > 1:
            wanted = self._choose(self._forms)
            self._asks = self._asks + 1 if wanted != self._forms else 0
            if self._asks >= PATIENCE:
                self._adopt(wanted)
        return bool(strays)

    def _adopt(self, forms: list[str]) -> None:
        self._asks = 0
        if forms != self._forms:
            self._groups = tuple((index,) for group in self._groups for index in group)
        self._forms = forms
        self._explain()

    def _explain(self) -> None:
        self._why = [
            reason(spec, self._forms[i], self._total[i], i in self._never, *self._both(spec), self._rates)
            for i, spec in enumerate(self.specs)
            if spec.linear and self.link.size > 1
        ]

    def dealt(self, largest: float) -> None:
        if self._seen:
            self._most = [math.ceil(rows * largest) for rows in self._total]
            self._adopt(self._choose())

    def cost(self, specs: Sequence[Spec], rows: int, size: int) -> Cost:
        forms = choose(specs, [rows] * len(specs), [rows * size] * len(specs), size, set(), self._absorbs)
        total = Cost(0, 0)
        for spec, form in zip(specs, forms, strict=True):
            one = factor_cost(spec, rows, size) if form == FACTORS else dense_cost(spec, size)
            total = Cost(total.steps + one.steps, total.bytes + one.bytes, total.flops + one.flops)
        return total

    def state(self) -> dict[str, Any]:
        kept = {"forms": list(self._forms), "never": sorted(self._never), "seen": self._seen}
        rows = {"most": list(self._most), "total": list(self._total)}
        return {
            "step": self.step,
            "memory": self.memory,
            "groups": [list(group) for group in self._groups],
            **kept,
            **rows,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.step, self.memory = state["step"], state.get("memory", self.memory)
        self._forms, self._never, self._seen = list(state["forms"]), set(state["never"]), state["seen"]
        self._total = list(state.get("total") or self._total)
        self._most = list(state.get("most") or self._most)
        self._groups = tuple(map(tuple, state.get("groups") or self._groups))
        self._explain()

    def rebuild(self, link: contract.Link) -> None:
        self.close()
        self.link = link
        self._seen = False
        self._measure_anew()
        self._start()

    def close(self) -> None:
        if self._flow:
            self._flow.close()


class _Coming(contract.Coming):
    def __init__(self, exchange: Exchange, flight: Flight, spec: Spec):
        self.exchange, self.flight, self.spec = exchange, flight, spec

    def arrived(self) -> bool:
        return self.exchange._flow is not None and self.exchange._flow.has(self.flight, self.spec.index)

    def wait(self) -> Piece:
        piece, pending = self.exchange.receive(self.flight, self.spec)
        self.exchange.remember(piece, pending)
        return piece
