"""The exchange as the processes of a node see it: one of them has the real one, the others hear from it.

    Follower       pieces into its place; verdict, forms and row counts from the Leader
    Leader         waits for everyone's part of a piece, offers the node's piece to the real exchange,
                   merges the ballots into the node's, and says what was agreed (`local_control`)

Where there is no other node, nothing is offered: each process adds up its own rows in the update.
"""

from __future__ import annotations

import selectors
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.contract import DENSE, FACTORS, Agreement, Ballot, Piece, Spec, Tally, Verdict
from paceline.engine.node.local_group import GLANCE_S, Crew
from paceline.engine.node.shared_memory import Places


class _Relay(contract.Exchange):
    """What both kinds share: the forms, and places for what was agreed.

    ``keeps``: a step may be computed again, so that its pieces stay as they are.
    """

    def __init__(
        self,
        exchange: contract.Exchange,
        crew: Crew,
        places: Places,
        specs: Sequence[Spec],
        alone: bool,
        keeps: bool = False,
    ):
        self.exchange, self.crew, self.places, self.specs = exchange, crew, places, specs
        self.fidelity, self.consensus = exchange.fidelity, exchange.consensus
        self.alone, self.keeps = alone, keeps
        self._forms: list[str] = []
        self._overflow: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        raise NotImplementedError

    def forms(self) -> Sequence[str]:
        return self._forms

    def _put(self, piece: Piece) -> int:
        """Into this process's place; the number of rows, or -1. Rows that do not fit are voted dense."""
        if piece.left is not None and not piece.spec.fits(len(piece.left)):
            self._overflow.add(piece.spec.index)
            return 0
        self.places.put(piece)
        return -1 if piece.left is None else len(piece.left)

    def _vote(self, ballot: Ballot) -> Ballot:
        ballot.dense = bytes(d or i in self._overflow for i, d in enumerate(ballot.dense))
        self._overflow = set()
        return ballot

    def cost(self, specs: Sequence[Spec], rows: int, size: int) -> contract.Cost:
        return self.exchange.cost(specs, rows, size)


class Leader(_Relay):
    """Local rank 0's exchange: collects the crew's pieces, and passes on what was agreed."""

    def _begin(self) -> None:
        if self.alone:  # measured: few rows in shared memory beat k whole gradients there, whatever the optimizer
            self._forms = [FACTORS if spec.linear else DENSE for spec in self.specs]
        else:
            self._forms = list(self.exchange.forms())
        self.share_forms()
        self._inbox: _Inbox | None = None
        self._ballots: list[Ballot] = []

    def share_forms(self) -> None:
        for peer in self.crew.lines:
            self.crew.send(peer, b"f", letters(self._forms))

    def renew_forms(self) -> list[str]:
        """Those of the exchange, after it may have changed them."""
        if not self.alone:
            self._forms = list(self.exchange.forms())
        return self._forms

    def why(self) -> Sequence[str]:
        return self.exchange.why()

    def before(self) -> None:
        self.exchange.before()
        self._inbox = _Inbox(self)

    def offer(self, piece: Piece) -> None:
        assert self._inbox
        num_rows = self._put(piece)
        if not self.alone:
            self._inbox.mark(0, piece.spec.index, num_rows)

    def node_piece(self, spec: Spec, rows: Sequence[int]) -> Piece:
        """The sum over the crew, in local rank order; factors are lined up, not added."""
        size = self.crew.size
        if self._forms[spec.index] == DENSE:
            flat = self.places.flat(spec)
            if self.keeps:
                flat = flat.clone()  # a broken sum may still write into it while the step is computed again
            for local_rank in range(1, size):
                flat += self.places.flat(spec, local_rank)
            return Piece(spec, flat=flat)
        parts = [self.places.get(spec, local_rank, rows[local_rank]) for local_rank in range(size)]
        left = torch.cat([part.left for part in parts if part.left is not None])
        right = torch.cat([part.right for part in parts if part.right is not None])
        return Piece(spec, left=left, right=right)

    def collect(self, ballot: Ballot) -> Ballot:
        assert self._inbox
        with self.crew.doubts.whereabouts.at("waiting for the other processes of this node"):
            self._ballots = [self._vote(ballot), *self._inbox.finish()]
        merged = Ballot.merge(self._ballots)
        return merged if self.alone else self.exchange.collect(merged)

    def finish(self, tally: Tally) -> Agreement:
        return self._alone(tally.ballot) if self.alone else self.exchange.finish(tally)

    def end(self) -> None:
        """The crew has ended its step, or broken it off as well."""
        assert self._inbox
        self._inbox.finish()

    def _alone(self, merged: Ballot) -> Agreement:
        """No other node: factors wherever all rows fit in place of the gradient, else dense."""
        lost = [
            self._forms[spec.index] == FACTORS
            and (bool(merged.dense[spec.index]) or not spec.fits(merged.rows[spec.index]))
            for spec in self.specs
        ]
        self._forms = [DENSE if dense else form for dense, form in zip(lost, self._forms, strict=True)]
        if not merged.ok or any(lost):
            return Agreement(Verdict.REDO, ballot=merged)
        pieces = [
            self.places.agreed(spec, -1)
            if self._forms[spec.index] == DENSE
            else self.node_piece(spec, [ballot.rows[spec.index] for ballot in self._ballots])
            for spec in self.specs
        ]
        return Agreement(Verdict.APPLY, pieces, merged)

    def settle(self, agreement: Agreement) -> bytes:
        """Pieces to where the crew can read them; the verdict and the row counts, as the crew is told them."""
        settled = [self.places.settle(piece) for piece in agreement.pieces]
        agreement.pieces = [piece for piece, _ in settled]
        rows = [num_rows for _, num_rows in settled]
        self.renew_forms()
        counts = struct.pack(f"<I{len(rows)}i", len(rows), *rows)
        word = agreement.verdict.value.encode()
        return bytes([agreement.drift, len(word)]) + word + counts + agreement.ballot.pack()

    def reconcile(self, weights: Sequence[Tensor]) -> None:
        if self.consensus != "step":
            self.exchange.reconcile(weights)
            self.crew.barrier("reconciling")

    def level(self, weights: Sequence[Tensor]) -> None:
        if self.consensus != "step":
            self.exchange.level(weights)
            self.crew.barrier("reconciling")

    def dealt(self, largest: float) -> None:
        self.exchange.dealt(largest)
        self._forms = list(self.exchange.forms())
        self.share_forms()

    def rebuild(self, link: contract.Link) -> None:
        self.exchange.rebuild(link)

    def state(self) -> dict[str, Any]:
        return {**self.exchange.state(), "forms": list(self._forms)}

    def load(self, state: dict[str, Any]) -> None:
        self.exchange.load(state)
        self._forms = list(state.get("forms", self._forms) if self.alone else self.exchange.forms())
        self.share_forms()

    def close(self) -> None:
        self.exchange.close()


class Follower(_Relay):
    """Another local rank's exchange: all it knows comes from local rank 0."""

    def _begin(self) -> None:
        self.hear_forms()

    def hear_forms(self, said: bytes | None = None) -> None:
        self._forms = forms_of(self.crew.expect(0, b"f", "learning the forms") if said is None else said)

    def offer(self, piece: Piece) -> None:
        num_rows = self._put(piece)
        if not self.alone:
            self.crew.send(0, b"p", struct.pack("<Ii", piece.spec.index, num_rows))

    def collect(self, ballot: Ballot) -> Ballot:
        return self._vote(ballot)

    def hear(self, body: bytes) -> Agreement:
        """What `Leader.settle` said."""
        drift, length = bool(body[0]), body[1]
        verdict = Verdict(body[2 : 2 + length].decode())
        (count,) = struct.unpack_from("<I", body, 2 + length)
        rows = struct.unpack_from(f"<{count}i", body, 6 + length)
        merged = Ballot.unpack(body[6 + length + 4 * count :])
        self.hear_forms()
        pieces = [self.places.agreed(spec, num_rows) for spec, num_rows in zip(self.specs, rows, strict=False)]
        return Agreement(verdict, pieces, merged, drift)

    def reconcile(self, weights: Sequence[Tensor]) -> None:
        if self.consensus != "step":
            self.crew.barrier("reconciling")

    level = reconcile

    def dealt(self, largest: float) -> None:
        self.hear_forms()

    def load(self, state: dict[str, Any]) -> None:
        self.hear_forms()


def letters(forms: Sequence[str]) -> bytes:
    return "".join(form[0] for form in forms).encode()


def forms_of(said: bytes) -> list[str]:
    return [FACTORS if letter == "f" else DENSE for letter in said.decode()]


class _Inbox:
    """Collects the crew's messages of one step, and offers each node piece once all have theirs."""

    def __init__(self, leader: Leader):
        self.leader, self.specs, self.size = leader, leader.specs, leader.crew.size
        self.rows: dict[int, dict[int, int]] = {spec.index: {} for spec in self.specs}
        self.ballots: dict[int, Ballot] = {}
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        if not leader.alone:
            self.thread = threading.Thread(target=self._run, name="paceline inbox", daemon=True)
            self.thread.start()

    def mark(self, local_rank: int, index: int, num_rows: int) -> None:
        with self.lock:
            self.rows[index][local_rank] = num_rows
            if len(self.rows[index]) == self.size:
                rows = [self.rows[index][r] for r in range(self.size)]
                self.leader.exchange.offer(self.leader.node_piece(self.specs[index], rows))

    def _run(self) -> None:
        try:
            self._collect()
        except BaseException as error:
            self.error = error

    def _collect(self) -> None:
        crew = self.leader.crew
        with selectors.DefaultSelector() as eyes:
            for peer, line in crew.lines.items():
                eyes.register(line, selectors.EVENT_READ, peer)
            heard_s = time.monotonic()
            while len(self.ballots) < self.size - 1:
                ready = eyes.select(GLANCE_S)
                for peer in () if ready else set(crew.lines) - set(self.ballots):
                    crew.doubt(peer, "computing the step", time.monotonic() - heard_s)
                for key, _ in ready:
                    heard_s = time.monotonic()
                    kind, body = crew.recv(key.data, "computing the step")
                    if kind == b"p":
                        self.mark(key.data, *struct.unpack("<Ii", body))
                    else:
                        crew.check(key.data, kind, b"v", "computing the step")
                        self.ballots[key.data] = Ballot.unpack(body)
                        eyes.unregister(key.fileobj)

    def finish(self) -> list[Ballot]:
        """The others' ballots, in local rank order."""
        if self.thread:
            self.thread.join()
        else:
            self._run()
        if self.error:
            raise self.error
        return [self.ballots[peer] for peer in sorted(self.ballots)]
