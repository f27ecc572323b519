"""Control as the processes of a node see it: one of them speaks for the node, the others through it.

FollowerControl    its words to local rank 0, and everyone's from it
LeaderControl      the node's words to the other nodes; after a loss the crew is told of it with the next answer
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline import contract
from paceline.contract import Agreement, Ballot, Guest, LinkError, Regroup, Tally, framed, unframed
from paceline.engine.node.local_exchange import Follower, Leader, letters
from paceline.engine.node.local_group import CrewError

HANDING, ADDING, GATHERING, SPREADING, TAKING = "handing on", "adding up", "gathering words", "spreading", "taking in"


class LeaderControl(contract.Control):
    """Local rank 0's. ``relay``: whose forms the crew is told after a loss."""

    def __init__(self, control: contract.Control, relay: Leader):
        self.control, self.relay, self.crew, self.survives = control, relay, relay.crew, control.survives
        self._news: list[bytes] = []  # of losses, that the crew has not been told
        control.regrouped = self._note
        self._say_place()

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.control.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.control.size

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self.control.generation

    @property
    def regroups(self) -> int:  # type: ignore[override]
        return self.control.regroups

    def _say_place(self) -> None:
        self.hand(json.dumps([self.rank, self.size, self.generation]).encode())

    def _note(self, news: Regroup) -> None:
        self._news.append(news.pack())
        if self.regrouped:
            self.regrouped(news)

    def _with_news(self, body: bytes) -> bytes:
        """After a loss with the forms as well, which may be others now."""
        forms = letters(self.relay.renew_forms()) if self._news and not self.relay.alone else b""
        news, self._news = framed(self._news), []
        return framed([news, struct.pack("<I", self.regroups), forms, body])

    def commit(self, ballot: Ballot, finish: Callable[[Tally], Agreement]) -> Agreement:
        try:
            agreement = self.control.commit(ballot, finish)
        except LinkError as error:
            self.crew.say_why(error)
            raise
        self._pass_on(agreement)
        return agreement

    def recover(self, error: LinkError) -> Agreement:
        try:
            if isinstance(error, CrewError) or not self.survives:
                raise error
            self.relay.end()
            agreement = self.control.recover(error)
        except LinkError as final:
            self.crew.say_why(final)
            raise
        self._pass_on(agreement)
        return agreement

    def _pass_on(self, agreement: Agreement) -> None:
        told = self._with_news(self.relay.settle(agreement))
        for peer in self.crew.lines:
            self.crew.send(peer, b"v", told)
        self.relay.share_forms()

    def total(self, values: Sequence[float]) -> list[float]:
        node = [sum(column) for column in zip(*self.crew.gather(values, ADDING), strict=True)]
        whole = self.control.total(node)
        self.crew.swap(self._with_news(b""), ADDING)
        return self.crew.gather(whole, ADDING)[0]

    def gather(self, *words: bytes) -> list[bytes]:
        node = [word for part in self.crew.swap(framed(words), GATHERING) for word in unframed(part)]
        whole = self.control.gather(*node)
        self.crew.swap(self._with_news(framed(whole)), GATHERING)
        return whole

    def spread(self, tensors: Sequence[Tensor]) -> None:
        self.control.spread(tensors)
        for tensor, place in self.relay.places.twins(tensors):
            place.copy_(tensor)
        self.crew.swap(self._with_news(b""), SPREADING)
        self.crew.barrier(SPREADING)

    def hand(self, words: bytes | bytearray) -> bytes:
        return self.crew.swap(bytes(words), HANDING)[0]

    def admit(self, guests: Sequence[Guest] = ()) -> None:
        try:
            self.control.admit(guests)
        except LinkError as error:
            self.crew.say_why(error)
            raise
        self.crew.swap(self._with_news(b""), TAKING)
        self.relay.renew_forms()
        self.relay.share_forms()

    def enter(self) -> None:
        self.control.enter()
        self._say_place()


class FollowerControl(contract.Control):
    """Another local rank's: all it knows comes from local rank 0."""

    def __init__(self, control: contract.Control, relay: Follower):
        self.relay, self.crew, self.survives = relay, relay.crew, control.survives
        self._hear_place()

    def _hear_place(self) -> None:
        self.rank, self.size, self.generation = json.loads(self.hand(b""))

    def _hear(self, told: bytes) -> bytes:
        news, regroups, forms, body = unframed(told)
        (self.regroups,) = struct.unpack("<I", regroups)
        if forms:
            self.relay.hear_forms(forms)
        for each in map(Regroup.unpack, unframed(news)):
            self.size, self.generation = len(each.origin) + len(each.came), each.generation
            self.rank = each.origin.index(self.rank)
            if self.regrouped:
                self.regrouped(each)
        return body

    def commit(self, ballot: Ballot, finish: Callable[[Tally], Agreement]) -> Agreement:
        self.crew.send(0, b"v", ballot.pack())
        return self.relay.hear(self._hear(self.crew.expect(0, b"v", "agreeing on the step")))

    def recover(self, error: LinkError) -> Agreement:
        """Local rank 0 has heard of it, or will: it is told that this process has no ballot."""
        if not self.survives:
            raise error
        return self.commit(Ballot(ok=False), self.relay.finish)

    def total(self, values: Sequence[float]) -> list[float]:
        self.crew.gather(values, ADDING)
        self._hear(self.crew.swap(b"", ADDING)[0])
        return self.crew.gather([0.0] * len(values), ADDING)[0]

    def gather(self, *words: bytes) -> list[bytes]:
        self.crew.swap(framed(words), GATHERING)
        return unframed(self._hear(self.crew.swap(b"", GATHERING)[0]))

    def spread(self, tensors: Sequence[Tensor]) -> None:
        self._hear(self.crew.swap(b"", SPREADING)[0])
        for tensor, place in self.relay.places.twins(tensors):
            tensor.copy_(place)
        self.crew.barrier(SPREADING)

    def hand(self, words: bytes | bytearray) -> bytes:
        return self.crew.swap(b"", HANDING)[0]

    def admit(self, guests: Sequence[Guest] = ()) -> None:
        self._hear(self.crew.swap(b"", TAKING)[0])
        self.relay.hear_forms()

    def enter(self) -> None:
        self._hear_place()
