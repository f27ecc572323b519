"""The exchange as the processes of a node see it: one of them holds the link, the others hear from it.

    Follower       pieces into its place; ballot to the Leader; verdict, forms and row counts from it
    Leader         waits for everyone's part of a piece, offers the node's piece to the real exchange,
                   merges the ballots into the node's, and passes on what was agreed

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
from paceline.contract import DENSE, FACTORS, Agreement, Ballot, Guest, Piece, Regroup, Spec, Verdict, framed, unframed
from paceline.engine.node.local_group import GLANCE_S, Crew, CrewError
from paceline.engine.node.shared_memory import Places


class _Relay(contract.Exchange):
    """What both kinds share: the forms, and places for what was agreed."""

    def __init__(self, exchange: contract.Exchange, crew: Crew, places: Places, specs: Sequence[Spec]):
        self.exchange, self.crew, self.places, self.specs, self.link = exchange, crew, places, specs, exchange.link
        self.fidelity, self.consensus, self.survives = exchange.fidelity, exchange.consensus, exchange.survives
        crew.doubts.whereabouts = exchange.link.whereabouts or crew.doubts.whereabouts
        self.alone = exchange.link.size == 1 and not exchange.link.grows
        crew.doubts.tells = crew.rank == 0 or (self.alone and crew.rank == 1)  # else it waits for who waits itself
        self._forms: list[str] = []
        self._overflow: set[int] = set()

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
    """Local rank 0's exchange: collects the crew's pieces, holds the link, and passes verdicts on."""

    def __init__(self, exchange: contract.Exchange, crew: Crew, places: Places, specs: Sequence[Spec]):
        super().__init__(exchange, crew, places, specs)
        if self.alone:  # measured: few rows in shared memory beat k whole gradients there, whatever the optimizer
            self._forms = [FACTORS if spec.linear else DENSE for spec in specs]
        else:
            self._forms = list(exchange.forms())
        self._share_forms()
        self._inbox: _Inbox | None = None
        self._news: list[bytes] = []  # of losses, that the crew has not been told
        exchange.regrouped = self._note

    def _note(self, news: Regroup) -> None:
        self._news.append(news.pack())
        if self.regrouped:
            self.regrouped(news)

    def _with_news(self, body: bytes) -> bytes:
        """After a loss with the forms as well, which may be others now."""
        forms = b""
        if self._news and not self.alone:
            self._forms = list(self.exchange.forms())
            forms = _letters(self._forms)
        news, self._news = framed(self._news), []
        return framed([news, struct.pack("<I", self.regroups), forms, body])

    @property
    def regroups(self) -> int:  # type: ignore[override]
        return self.exchange.regroups

    def _share_forms(self) -> None:
        for peer in self.crew.lines:
            self.crew.send(peer, b"f", _letters(self._forms))

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
            if self.survives:
                flat = flat.clone()  # a broken sum may still write into it while the step is computed again
            for local_rank in range(1, size):
                flat += self.places.flat(spec, local_rank)
            return Piece(spec, flat=flat)
        parts = [self.places.get(spec, local_rank, rows[local_rank]) for local_rank in range(size)]
        left = torch.cat([part.left for part in parts if part.left is not None])
        right = torch.cat([part.right for part in parts if part.right is not None])
        return Piece(spec, left=left, right=right)

    def agree(self, ballot: Ballot) -> Agreement:
        assert self._inbox
        try:
            with self.crew.doubts.whereabouts.at("waiting for the other processes of this node"):
                ballots = [self._vote(ballot), *self._inbox.finish()]
            agreement = self._alone(ballots) if self.alone else self.exchange.agree(Ballot.merge(ballots))
        except contract.LinkError as error:
            self.crew.say_why(error)
            raise
        self._pass_on(agreement)
        return agreement

    def recover(self, error: contract.LinkError) -> Agreement:
        """After the crew has ended its step, or broken it off as well."""
        assert self._inbox
        try:
            if isinstance(error, CrewError) or not self.survives:
                raise error
            self._inbox.finish()
            agreement = self.exchange.recover(error)
        except contract.LinkError as final:
            self.crew.say_why(final)
            raise
        self._pass_on(agreement)
        return agreement

    def _alone(self, ballots: Sequence[Ballot]) -> Agreement:
        """No other node: factors wherever all rows fit in place of the gradient, else dense."""
        merged = Ballot.merge(ballots)
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
            else self.node_piece(spec, [ballot.rows[spec.index] for ballot in ballots])
            for spec in self.specs
        ]
        return Agreement(Verdict.APPLY, pieces, merged)

    def _pass_on(self, agreement: Agreement) -> None:
        """Pieces to where the crew can read them; then the verdict, the forms and the row counts."""
        settled = [self.places.settle(piece) for piece in agreement.pieces]
        agreement.pieces = [piece for piece, _ in settled]
        rows = [num_rows for _, num_rows in settled]
        if not self.alone:
            self._forms = list(self.exchange.forms())
        counts = struct.pack(f"<I{len(rows)}i", len(rows), *rows)
        word = agreement.verdict.value.encode()
        body = bytes([agreement.drift, len(word)]) + word + counts + agreement.ballot.pack()
        told = self._with_news(body)
        for peer in self.crew.lines:
            self.crew.send(peer, b"v", told)
        self._share_forms()

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
        self._share_forms()

    def total(self, values: Sequence[float]) -> list[float]:
        node = [sum(column) for column in zip(*self.crew.gather(values, "adding up"), strict=True)]
        whole = self.exchange.total(node)
        self.crew.swap(self._with_news(b""), "adding up")
        return self.crew.gather(whole, "adding up")[0]

    def gather(self, *words: bytes) -> list[bytes]:
        node = [word for part in self.crew.swap(framed(words), "gathering words") for word in unframed(part)]
        whole = self.exchange.gather(*node)
        self.crew.swap(self._with_news(framed(whole)), "gathering words")
        return whole

    def spread(self, tensors: Sequence[Tensor]) -> None:
        self.exchange.spread(tensors)
        for tensor, place in self.places.twins(tensors):
            place.copy_(tensor)
        self.crew.swap(self._with_news(b""), "spreading")
        self.crew.barrier("spreading")

    def rebuild(self, link: contract.Link) -> None:
        self.exchange.rebuild(link)
        self.link = link

    def admit(self, guests: Sequence[Guest] = ()) -> None:
        try:
            self.exchange.admit(guests)
        except contract.LinkError as error:
            self.crew.say_why(error)
            raise
        self.crew.swap(self._with_news(b""), "taking a node in")
        self._forms = list(self.exchange.forms())
        self._share_forms()

    def enter(self) -> None:
        self.exchange.enter()

    def hand(self, words: bytes | bytearray) -> bytes:
        return self.crew.swap(bytes(words), "handing on")[0]

    def state(self) -> dict[str, Any]:
        return {**self.exchange.state(), "forms": list(self._forms)}

    def load(self, state: dict[str, Any]) -> None:
        self.exchange.load(state)
        self._forms = list(state.get("forms", self._forms) if self.alone else self.exchange.forms())
        self._share_forms()

    def close(self) -> None:
        self.exchange.close()


class Follower(_Relay):
    """Another local rank's exchange: all it knows comes from local rank 0."""

    def __init__(self, exchange: contract.Exchange, crew: Crew, places: Places, specs: Sequence[Spec]):
        super().__init__(exchange, crew, places, specs)
        self._hear_forms()

    def _hear_forms(self) -> None:
        self._forms = _forms(self.crew.expect(0, b"f", "learning the forms"))

    def offer(self, piece: Piece) -> None:
        num_rows = self._put(piece)
        if not self.alone:
            self.crew.send(0, b"p", struct.pack("<Ii", piece.spec.index, num_rows))

    def agree(self, ballot: Ballot) -> Agreement:
        return self._verdict(self._vote(ballot))

    def recover(self, error: contract.LinkError) -> Agreement:
        """Local rank 0 has heard of it, or will: it is told that this process has no ballot."""
        if not self.survives:
            raise error
        return self._verdict(Ballot(ok=False))

    def _hear(self, told: bytes) -> bytes:
        news, regroups, forms, body = unframed(told)
        (self.regroups,) = struct.unpack("<I", regroups)
        self._forms = _forms(forms) if forms else self._forms
        for each in map(Regroup.unpack, unframed(news)):
            self.link.size, self.link.generation = len(each.origin) + len(each.came), each.generation
            if self.regrouped:
                self.regrouped(each)
        return body

    def _verdict(self, ballot: Ballot) -> Agreement:
        self.crew.send(0, b"v", ballot.pack())
        body = self._hear(self.crew.expect(0, b"v", "agreeing on the step"))
        drift, length = bool(body[0]), body[1]
        verdict = Verdict(body[2 : 2 + length].decode())
        (count,) = struct.unpack_from("<I", body, 2 + length)
        rows = struct.unpack_from(f"<{count}i", body, 6 + length)
        merged = Ballot.unpack(body[6 + length + 4 * count :])
        self._hear_forms()
        pieces = [self.places.agreed(spec, num_rows) for spec, num_rows in zip(self.specs, rows, strict=False)]
        return Agreement(verdict, pieces, merged, drift)

    def reconcile(self, weights: Sequence[Tensor]) -> None:
        if self.consensus != "step":
            self.crew.barrier("reconciling")

    level = reconcile

    def dealt(self, largest: float) -> None:
        self._hear_forms()

    def total(self, values: Sequence[float]) -> list[float]:
        self.crew.gather(values, "adding up")
        self._hear(self.crew.swap(b"", "adding up")[0])
        return self.crew.gather([0.0] * len(values), "adding up")[0]

    def gather(self, *words: bytes) -> list[bytes]:
        self.crew.swap(framed(words), "gathering words")
        return unframed(self._hear(self.crew.swap(b"", "gathering words")[0]))

    def spread(self, tensors: Sequence[Tensor]) -> None:
        self._hear(self.crew.swap(b"", "spreading")[0])
        for tensor, place in self.places.twins(tensors):
            tensor.copy_(place)
        self.crew.barrier("spreading")

    def load(self, state: dict[str, Any]) -> None:
        self._hear_forms()

    def rebuild(self, link: contract.Link) -> None:
        self.link = link

    def admit(self, guests: Sequence[Guest] = ()) -> None:
        self._hear(self.crew.swap(b"", "taking a node in")[0])
        self._hear_forms()

    def enter(self) -> None:
        """Local rank 0 does."""

    def hand(self, words: bytes | bytearray) -> bytes:
        return self.crew.swap(b"", "handing on")[0]


def _letters(forms: Sequence[str]) -> bytes:
    return "".join(form[0] for form in forms).encode()


def _forms(letters: bytes) -> list[str]:
    return [FACTORS if letter == "f" else DENSE for letter in letters.decode()]


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
