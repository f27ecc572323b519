"""Everyone's gradients added on the wire while backward runs; fully-connected layers as factors.

*Cost* (N ranks, n bytes dense): 2 (N - 1) / N n sent per rank on a ring; a layer sent as factors costs
(N - 1) rows (in + out) words instead of 2 (N - 1) / N in out, and each rank multiplies everyone's rows.
*Laws*: N ranks equal one process on the global batch; replicas stay bit-equal; pieces leave in one order.
*Source*: wait-free backpropagation and factors: Zhang et al. 2017 (arXiv 1706.03292), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.codec.lossless import LEAST_BYTES, Added, Gathered, fits, joined, pack
from paceline.contract import DENSE, FACTORS, Agreement, Ballot, Cost, Piece, Spec, Tally, Verdict
from paceline.exchange.flow.autotuner import ASKED, PACKED, Choice
from paceline.exchange.flow.cost_model import choose, dense_cost, factor_cost, toll
from paceline.exchange.flow.send_queue import Flight, Lane, Sent


class Exchange(contract.Exchange):
    """``forms``: "measured", "bytes" as long as training lasts, or always one of "dense" and "factors" where possible.

    ``packed``: "measured", where the wire is slow enough for it; "always"; "never". It changes no bit of any sum.
    Memory of the codec belongs to this rank and moves only when a step is applied.
    """

    overlaps: tuple[str, ...] = ("backward", "forward")
    _absorbs = False
    _asked = _packed = "measured"
    factors = True

    def __init__(self, forms: str = "measured", packed: str = "measured"):
        if forms not in ASKED:
            raise ValueError(f"exchange 'allreduce': forms is one of {', '.join(ASKED)}, got {forms!r}")
        if packed not in PACKED:
            raise ValueError(f"exchange 'allreduce': packed is one of {', '.join(PACKED)}, got {packed!r}")
        self._asked, self._packed = forms, packed
        self.factors = forms != DENSE

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
        by_need = self.overlap == "forward"
        self.choice = Choice(
            specs, link.size, codec, self._asked, rows, absorbs, by_need, self.thin, self._packed, link.cost
        )
        self.choice.multiply_by, self.choice.hands = self.multiply, self.hands
        self._start()

    def _start(self) -> None:
        self._lane = self.link.lane("gradients") if self.link.size > 1 else self.link
        self._flow = Lane(self._send, self.link.threads) if self.link.size > 1 else None
        self._flight = Flight(self.choice.groups, self.step, self.choice.packed, self.choice.quick)
        self._before: tuple[Flight, list[Cost]] | None = None  # the last step whose pieces came after its vote
        self._got: list[tuple[Piece, Any]] = []

    def forms(self) -> Sequence[str]:
        return self.choice.forms

    def why(self) -> Sequence[str]:
        return self.choice.why

    def before(self) -> None:
        self._flight = Flight(self.choice.groups, self.step, self.choice.packed, self.choice.quick)

    def offer(self, piece: Piece) -> None:
        self.choice.types[piece.spec.index] = piece.kind
        if self._flow and self.overlap == "forward" and piece.right is not None:
            piece.right = piece.right.clone()  # it may leave after the step, when a script fills its input anew
        if self._flow:
            self._flow.offer(self._flight, piece)
        else:
            self._flight.offered[piece.spec.index] = 0.0
            self._flight.waiting[piece.spec.index] = piece

    def _send(self, pieces: Sequence[Piece], flight: Flight) -> Sent:
        first, spec = pieces[0], pieces[0].spec
        self._lane.hurry(flight.quick)
        what = f"{', '.join(spec.names[:2])}{' ...' if len(spec.names) > 2 or len(pieces) > 1 else ''}"
        if first.left is not None and first.right is not None:
            # (rows, out + in)
            both = torch.cat([first.left, first.right.to(first.left.dtype)], dim=1)
            both = both.to(self.thin or both.dtype)
            what = f"all-gather of the factors of {what} ({both.nbytes / 1e6:.1f} MB)"
            return Sent(pieces, *self._gather(both, what, flight))
        payloads, pending = [], []
        for piece in pieces:
            assert piece.flat is not None
            payload, remembered = self.codec.encode(piece.flat, self.memory[piece.spec.index], flight.step)
            payloads.append(payload)
            pending.append(remembered)
        payload = payloads[0] if len(payloads) == 1 else torch.cat(payloads)
        what = f"sum of bucket {spec.index}: {what} ({payload.nbytes / 1e6:.1f} MB)"
        lengths = [len(each) for each in payloads]
        if self.codec.sums:
            return Sent(pieces, *self._sum(payload, what, flight, first.kind[0]), pending, lengths)
        begin_s = self.link.threads.now()
        return Sent(pieces, self._lane.all_gather(payload, what), begin_s, pending, lengths)

    def _gather(self, both: Tensor, what: str, flight: Flight) -> tuple[contract.Handle, float]:
        """(the gather, when it began)."""
        now = self.link.threads.now
        if not flight.packed or not fits(both):
            begin_s = now()
            return self._lane.all_gather(both, what), begin_s
        packed, begin_s, width = pack(both), now(), both.shape[1]
        handle = self._lane.all_gather(packed, what)
        return Gathered(
            handle, self.link.rank, both.reshape(-1), lambda parts: [part.view(-1, width) for part in parts], now
        ), begin_s

    def _sum(self, payload: Tensor, what: str, flight: Flight, own: torch.dtype) -> tuple[contract.Handle, float]:
        """(the sum, when it began). Among two a gather sends no more, so it can be packed, and what was rounded for the
        wire is added in the gradient's own type; among more it would send more."""
        now, mine, own = self.link.threads.now, self.link.rank, own.to_real()  # a codec may send both parts of a number
        rounded = payload.itemsize < own.itemsize
        packs = flight.packed and payload.nbytes >= LEAST_BYTES and fits(payload)
        if self.link.size > 2 or not (packs or rounded):
            begin_s = now()
            return self._lane.sum(payload, what), begin_s

        def add(parts: list[Tensor]) -> Tensor:
            whole = parts[mine].to(own) if rounded else parts[mine]
            return whole.add_(parts[1 - mine])

        sent, begin_s = pack(payload) if packs else payload, now()
        handle = self._lane.all_gather(sent, what, even=not packs)
        return Gathered(handle, mine, payload, add, now) if packs else Added(handle, add), begin_s

    def receive(self, flight: Flight, spec: Spec) -> tuple[Piece, Any]:
        """(what everyone's pieces come to, what the codec will remember). Waits for it; called once for each."""
        assert self._flow
        sent, place = self._flow.take(flight, spec.index)
        piece, got = sent.pieces[place], sent.result
        if piece.left is not None:
            out_features = spec.shapes[0][0]
            # rank after rank, so that every node multiplies in the same order
            both = joined(got).to(piece.left.dtype)
            return Piece(spec, left=both[:, :out_features], right=both[:, out_features:]), None
        assert piece.flat is not None
        numel, dtype, pending = spec.numel, piece.flat.dtype, sent.pending[place]
        if len(sent.pieces) > 1:
            got = torch.split(got, sent.lengths)[place]
        if self.codec.sums:
            return Piece(spec, flat=self.codec.decode(got, numel, dtype)), pending
        whole = self.codec.decode(got[0], numel, dtype)
        for payload in got[1:]:
            whole += self.codec.decode(payload, numel, dtype)
        return Piece(spec, flat=whole), pending

    def remember(self, got: Sequence[tuple[Piece, Any]], ballot: Ballot) -> None:
        """What the codec keeps of these pieces; nothing of any where one is not finite, and so will not be applied."""
        dense = [(piece.spec, piece.flat, pending) for piece, pending in got if piece.flat is not None]
        memory = {spec.index: self.codec.settle(pending, flat) for spec, flat, pending in dense}
        if all(kept is None for kept in memory.values()):
            self.memory.update(memory)
        elif ballot.weight and all(bool(part.isfinite().all()) for piece, _ in got for part in piece.parts):
            for spec, _, _ in dense if self.codec.owes else ():
                before, after = self.memory[spec.index], memory[spec.index]
                memory[spec.index] = self.codec.retain(before, after, self._unused(spec, ballot.used))
            self.memory.update(memory)

    def _unused(self, spec: Spec, used: bytes) -> list[slice]:
        """Where the parameters lie in its piece that nobody used: no optimizer takes what was sent of them."""
        first = sum(len(one.names) for one in self.specs[: spec.index])
        ends = list(accumulate(spec.numels))
        return [
            slice(end - numel, end)
            for end, numel, here in zip(ends, spec.numels, used[first : first + len(ends)], strict=True)
            if not here
        ]

    def collect(self, ballot: Ballot) -> Ballot:
        if self._flow is None:
            return ballot
        flight, later = self._flight, self.overlap == "forward"
        self._got = [] if later else [self.receive(flight, spec) for spec in self.specs]
        measured = self._before[0] if later and self._before else flight
        ballot.ready, ballot.took = flight.ready(), measured.took()
        ballot.multiply = self.choice.multiplication()
        return ballot

    def finish(self, tally: Tally) -> Agreement:
        merged, ballots = tally.ballot, tally.ballots
        if self._flow is None:
            return self._alone(merged)
        flight, later, got = self._flight, self.overlap == "forward", self._got
        self._got = []
        coming: list[contract.Coming] = [
            _Coming(self, flight, self.specs[i], merged) for group in flight.groups for i in group
        ]
        most = [max(ballot.rows[spec.index] for ballot in ballots) for spec in self.specs]
        costs = self.choice.costs(flight.groups, most)
        measured = self._before if later else (flight, costs)
        self.choice.learn(merged, self._moved(*measured) if measured else [])
        self._before = (flight, costs) if later else None
        redo = self.choice.again(merged, ballots)
        if not merged.ok or redo:
            for spec in self.specs if later else ():
                self.receive(flight, spec)  # they lie in gradients that the step begins with again
            return Agreement(Verdict.REDO, ballot=merged, drift=tally.drift)
        self.step += 1
        if later:
            return Agreement(Verdict.APPLY, [], merged, tally.drift, coming)
        if merged.finite:
            self.remember(got, merged)
        return Agreement(Verdict.APPLY, [piece for piece, _ in got], merged, tally.drift)

    def _moved(self, flight: Flight, costs: list[Cost]) -> list[Cost]:
        """With the bytes that were sent, where they were packed: everyone has seen the same messages."""
        others, packed = self.link.size - 1, flight.packed_bytes
        for group in flight.groups:
            whole = costs[group[0]].in_sequence
            left = others * packed[group[0]] / whole if whole and group[0] in packed else 1.0
            for i in group:
                self.choice.left[i] = left
        return [self.choice.gathered(packed[i]) if i in packed else cost for i, cost in enumerate(costs)]

    def _alone(self, ballot: Ballot) -> Agreement:
        pieces = [self._flight.waiting[spec.index] for spec in self.specs]
        self._flight = Flight(self.choice.groups, self.step)
        redo = self.choice.again(ballot, [ballot]) or not ballot.ok
        return Agreement(Verdict.REDO if redo else Verdict.APPLY, [] if redo else pieces, ballot)

    def dealt(self, largest: float) -> None:
        self.choice.dealt(largest)

    def cost(self, specs: Sequence[Spec], rows: int, size: int) -> Cost:
        asks = toll(self.link, size)
        forms = choose(specs, [rows] * len(specs), [rows * size] * len(specs), size, set(), self._absorbs, asks=asks)
        total = Cost(0, 0)
        for spec, form in zip(specs, forms, strict=True):
            one = factor_cost(spec, rows, size, asks=asks) if form == FACTORS else dense_cost(spec, size, asks=asks)
            total = Cost(total.steps + one.steps, total.bytes + one.bytes, total.flops + one.flops)
        return total

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "memory": self.memory, **self.choice.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.step, self.memory = state["step"], state.get("memory", self.memory)
        if "forms" in state:
            self.choice.load(state)
        elif "owing" in state:
            self.choice.owe(state["owing"])

    def rebuild(self, link: contract.Link) -> None:
        self.close()
        self.link = link
        self.choice.anew(link.size, link.cost)
        self._start()

    def close(self) -> None:
        if self._flow:
            self._flow.close()


class _Coming(contract.Coming):
    def __init__(self, exchange: Exchange, flight: Flight, spec: Spec, ballot: Ballot):
        self.exchange, self.flight, self.spec, self.ballot = exchange, flight, spec, ballot

    def arrived(self) -> bool:
        return self.exchange._flow is not None and self.exchange._flow.has(self.flight, self.spec.index)

    def wait(self) -> Piece:
        with self.exchange.link.waiting("what the last step agreed on"):
            piece, pending = self.exchange.receive(self.flight, self.spec)
        self.exchange.remember([(piece, pending)], self.ballot)
        return piece
