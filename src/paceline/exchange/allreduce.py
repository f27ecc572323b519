"""Everyone's gradients added on the wire while backward runs; fully-connected layers as factors.

*Cost* (N ranks, n bytes dense): 2 (N - 1) / N n sent per rank on a ring; a layer sent as factors costs
(N - 1) rows (in + out) words instead of 2 (N - 1) / N in out, and each rank multiplies everyone's rows.
*Laws*: N ranks equal one process on the global batch; replicas stay bit-equal; pieces leave in one order.
*Source*: wait-free backpropagation and factors: Zhang et al. 2017 (arXiv 1706.03292), sections 3 and 4.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.contract import DENSE, FACTORS, Agreement, Ballot, Cost, LinkError, Piece, Spec, Verdict
from paceline.exchange.meeting import Meeting

PATIENCE_S = 2000.0  # longer than any link waits


class Exchange(Meeting):
    """Memory of the codec belongs to this rank and moves only when a step is applied."""

    _absorbs = False

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
        self._forms = self._choose([rows] * len(specs), [rows * link.size] * len(specs))
        self._seen = False
        self._total: list[int] = []  # rows per spec, of everyone, that the forms were chosen for
        self._start()

    def _start(self) -> None:
        self._lane = self.link.lane("gradients") if self.link.size > 1 else self.link
        self._waiting: dict[int, Piece] = {}
        self._next = 0
        self._turns: queue.Queue[Piece | None] = queue.Queue()
        self._sent: dict[int, _Sent] = {}
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send_in_turn, name="paceline lane", daemon=True)
        if self.link.size > 1:
            self._thread.start()

    def _choose(self, most: Sequence[int], total: Sequence[int]) -> list[str]:
        return choose(self.specs, most, total, self.link.size, self._never, self._absorbs)

    def forms(self) -> Sequence[str]:
        return self._forms

    def before(self, weights: Sequence[Tensor]) -> None:
        """A step that was interrupted in the middle of backward has left pieces behind."""
        if not (self._next or self._waiting or self._sent):
            return
        if self.link.size > 1:
            raise LinkError("the step before was interrupted while its pieces were leaving; join again")
        self._waiting, self._next, self._turns = {}, 0, queue.Queue()

    def offer(self, piece: Piece) -> None:
        """Waits for its turn: the order on the wire is that of the specs on every rank."""
        with self._changed:
            self._waiting[piece.spec.index] = piece
            while self._next in self._waiting:
                self._turns.put(self._waiting.pop(self._next))
                self._next += 1

    def _send_in_turn(self) -> None:
        while (piece := self._turns.get()) is not None:
            try:
                sent = self._send(piece)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._sent[piece.spec.index] = sent
                self._changed.notify_all()

    def _send(self, piece: Piece) -> _Sent:
        spec = piece.spec
        what = f"{', '.join(spec.names[:2])}{' ...' if len(spec.names) > 2 else ''}"
        if piece.left is not None and piece.right is not None:
            # (rows, out + in)
            both = torch.cat([piece.left, piece.right.to(piece.left.dtype)], dim=1)
            what = f"all-gather of the factors of {what} ({both.nbytes / 1e6:.1f} MB)"
            return _Sent(piece, self._lane.all_gather(both, what))
        assert piece.flat is not None
        payload, pending = self.codec.encode(piece.flat, self.memory[spec.index], self.step)
        operation = self._lane.sum if self.codec.sums else self._lane.all_gather
        what = f"sum of bucket {spec.index}: {what} ({payload.nbytes / 1e6:.1f} MB)"
        return _Sent(piece, operation(payload, what), pending)

    def _receive(self, sent: _Sent) -> Piece:
        spec = sent.piece.spec
        got = sent.handle.wait()
        if self._forms[spec.index] == FACTORS:
            out_features = spec.shapes[0][0]
            # rank after rank, so that every node multiplies in the same order
            both = torch.cat(got)
            return Piece(spec, left=both[:, :out_features], right=both[:, out_features:])
        assert sent.piece.flat is not None
        numel, dtype = spec.numel, sent.piece.flat.dtype
        if self.codec.sums:
            return Piece(spec, flat=self.codec.decode(got, numel, dtype))
        whole = self.codec.decode(got[0], numel, dtype)
        for payload in got[1:]:
            whole += self.codec.decode(payload, numel, dtype)
        return Piece(spec, flat=whole)

    def agree(self, ballot: Ballot) -> Agreement:
        if self.link.size == 1:
            pieces = [piece for _ in self.specs if (piece := self._turns.get_nowait())]
            self._next = 0
            redo = self._choose_again(ballot, [ballot]) or not ballot.ok
            return Agreement(Verdict.REDO if redo else Verdict.APPLY, [] if redo else pieces, ballot)
        with self._changed:
            done = self._changed.wait_for(lambda: self._error or len(self._sent) == len(self.specs), PATIENCE_S)
        if self._error:
            raise self._error
        assert done, f"pieces were never offered: {set(range(len(self.specs))) - set(self._sent)}"
        pieces = [self._receive(self._sent[spec.index]) for spec in self.specs]
        sent, self._sent, self._next = self._sent, {}, 0
        merged, ballots, drift = self.vote(ballot)
        redo = self._choose_again(merged, ballots)
        if not merged.ok or redo:
            return Agreement(Verdict.REDO, ballot=merged, drift=drift)
        for piece in pieces if merged.finite else ():
            if piece.flat is not None:
                pending = sent[piece.spec.index].pending
                self.memory[piece.spec.index] = self.codec.settle(pending, piece.flat)
        self.step += 1
        return Agreement(Verdict.APPLY, pieces, merged, drift)

    def _choose_again(self, merged: Ballot, ballots: Sequence[Ballot]) -> bool:
        """True if the step must be redone: factors were not a whole gradient, or more than its place holds."""
        strays = {i for i, dense in enumerate(merged.dense) if dense}
        for spec in self.specs if self.link.size > 1 else ():
            if self._forms[spec.index] == FACTORS and not spec.fits(merged.rows[spec.index]):
                strays.add(spec.index)
        self._never |= strays
        if not self._seen or strays:
            most = [max(ballot.rows[spec.index] for ballot in ballots) for spec in self.specs]
            self._total = list(merged.rows)
            self._forms = self._choose(most, self._total)
            self._seen = self._seen or merged.ok
        return bool(strays)

    def dealt(self, largest: float) -> None:
        if self._total:
            self._forms = self._choose([math.ceil(rows * largest) for rows in self._total], self._total)

    def cost(self, specs: Sequence[Spec], rows: int, size: int) -> Cost:
        forms = choose(specs, [rows] * len(specs), [rows * size] * len(specs), size, set(), self._absorbs)
        total = Cost(0, 0)
        for spec, form in zip(specs, forms, strict=True):
            one = factor_cost(spec, rows, size) if form == FACTORS else dense_cost(spec, size)
            total = Cost(total.steps + one.steps, total.bytes + one.bytes, total.flops + one.flops)
        return total

    def state(self) -> dict[str, Any]:
        kept = {"forms": list(self._forms), "never": sorted(self._never), "seen": self._seen, "total": self._total}
        return {"step": self.step, "memory": self.memory, **kept}

    def load(self, state: dict[str, Any]) -> None:
        self.step, self.memory = state["step"], state.get("memory", self.memory)
        self._forms, self._never, self._seen = list(state["forms"]), set(state["never"]), state["seen"]
        self._total = list(state.get("total", ()))

    def rebuild(self, link: contract.Link) -> None:
        self.close()
        self.link = link
        self._seen = False
        self._start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._turns.put(None)
            self._thread.join(5.0)


class _Sent:
    """A piece on its way."""

    def __init__(self, piece: Piece, handle: contract.Handle, pending: Any = None):
        self.piece, self.handle, self.pending = piece, handle, pending


def dense_cost(spec: Spec, size: int, itemsize: int = 4) -> Cost:
    return Cost(2 * (size - 1), 2 * (size - 1) / size * spec.numel * itemsize)


def factor_cost(spec: Spec, rows: int, size: int, itemsize: int = 4) -> Cost:
    """``rows``: the most that any rank sends. The flops are those beyond the rank's own rows."""
    words = rows * sum(spec.shapes[0])
    return Cost(2 * (size - 1), (size - 1) * words * itemsize, 2.0 * rows * (size - 1) * spec.numel)


def choose(
    specs: Sequence[Spec],
    most: Sequence[int],
    total: Sequence[int],
    size: int,
    never: set[int],
    absorbs: bool = False,
) -> list[str]:
    """Factors where everyone's rows fit in the gradient's place, and pay: by fewer bytes than the sum, or, where
    nothing is sent, by an optimizer that absorbs them."""

    def pays(spec: Spec) -> bool:
        if size == 1:
            return absorbs
        return factor_cost(spec, most[spec.index], size).bytes < dense_cost(spec, size).bytes

    def form(spec: Spec) -> str:
        possible = spec.linear and spec.index not in never and spec.fits(total[spec.index])
        return FACTORS if possible and pays(spec) else DENSE

    return [form(spec) for spec in specs]
