"""A joining node: alone until the members of the run admit it between two of their steps.

    asks      the member that leads, at its meeting point, again and again, one question at a time
    is told   why not; or, once all have met, who they are and where this one's place is among them
    rebuild   the link that all have from then on

Whoever asks has proved the run's secret, and a question is gone with the line that it came by.

A node that comes late, until it is taken in.

    join       builds all that is its own, and asks where training is
    batches    waits to be taken in; takes over what all have in common; its first batch is the others' next
    before     it is alone: what it saves or evaluates is nobody's

A call of `batches` that the others have finished gives nothing here, so that loops of several calls go on in step.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from paceline import transport
from paceline.elastic import state_transfer
from paceline.elastic.bulk_channel import BulkChannel, reach
from paceline.elastic.catch_up import follow
from paceline.elastic.membership import Joined
from paceline.elastic.quorum import ALIVE, UNREACHABLE
from paceline.elastic.reconfigure import ANSWER, GUEST, JOIN_S, MEMBERS, NEW, TURN_S, MemberAddress, Reconfiguration
from paceline.environment import wait_s
from paceline.errors import LinkError
from paceline.link.gloo import Link
from paceline.link.net import route
from paceline.link.net.auth import EncryptionKey, secret_of_environment
from paceline.link.net.framing import closed_on_error
from paceline.link.net.store_client import NO_RANK_YET, StoreClient
from paceline.link.net.store_server import RendezvousStore
from paceline.link.net.ticket import JoinTicket
from paceline.report.activity import BACK_S, Activity
from paceline.report.log import log
from paceline.step.run_state import RunState
from paceline.transport import Joiner

TIMEOUT_S = 1800.0  # for members who are alive and do not answer before their step has ended
POLL_S, LONG_POLL_S = 0.02, 0.2
OVER_S = 10.0  # for which all must be gone: a firewall may refuse for them, for a moment
NOTICE_S = 10.0  # before people are told of a wait for an answer
OVER = "none of those who trained answers any more; the run has ended, or look there"


class JoiningLink:
    """``ticket``: of the run. ``node``: which of its nodes this one is, where it was one before. ``kind``: of the link
    that the members have. Raises ValueError where the run is encrypted and that link is not, or the reverse."""

    def __init__(self, ticket: Path, node: str = "", kind: type[Link] = Link):
        self.activity = Activity(BACK_S)  # all others have measured their steps
        self._link: Link | None = None
        self._ticket, found, self._kind = ticket, _awaited(ticket), kind
        if found.hides != kind.hides:
            theirs, mine = ("with", "without") if found.hides else ("without", "with")
            raise ValueError(
                f"{ticket} is of a run that was started {theirs} --encrypt, and this node was started {mine}; start it "
                f"as the others (PACELINE_ENCRYPT)"
            )
        self._secret = EncryptionKey(found.secret.encode()) if found.hides else found.secret.encode()
        secret_of_environment()  # what this process starts does not get it
        self._places = [MemberAddress.read(each.encode()) for each in found.members]
        self._behind: list[MemberAddress] = []
        self._name = f"{node or NEW}-{secrets.token_hex(8)}"
        self._host = os.environ.get("PACELINE_HOST", socket.gethostname())
        self._line: StoreClient | None = None
        self._point: RendezvousStore | None = None
        self._bulk: BulkChannel | None = None
        self._turn, self._told = 0, dict[str, Any]()
        self.glance: Callable[[], None] = lambda: None  # while waiting: raises where waiting is to end

    def request(
        self, who: dict[str, Any], more: dict[str, Any] | None = None, hear: Callable[[bytearray], object] | None = None
    ) -> dict[str, Any]:
        """The leader's answer to who this is, and then to ``more``. ``hear`` is given the messages before that answer.

        Whoever leads later is asked anew. Raises LinkError where it refuses, or nobody is left who could answer.
        """
        end, why, over_s = time.monotonic() + TIMEOUT_S, "no answer", math.inf
        while time.monotonic() < end:
            try:
                line = self._meet()
                if self._bulk is None:
                    self._told = self._ask(line, who, end)
                    address, port = self._told["hatch"]
                    self._bulk = reach(address, port, self._secret, self._name)
                if more:
                    self._told = self._ask(line, {**who, **more}, end, hear)
                return self._told
            except Over:
                self.leave()
                over_s = min(over_s, time.monotonic())
                if time.monotonic() - over_s > OVER_S:
                    self._ticket.unlink(missing_ok=True)  # nobody tries again
                    raise
                self.glance()
                time.sleep(LONG_POLL_S)
            except (Refused, Unheard):
                self.leave()
                raise
            except LinkError as error:
                why, over_s = str(error), math.inf
                self.leave()
                self.glance()
                time.sleep(LONG_POLL_S)
        raise LinkError(f"this node, {self._host}, was not answered within {TIMEOUT_S:.0f} s ({why}); look there")

    def _meet(self) -> StoreClient:
        """A line to who leads, and a meeting point of this one's own, on the way there."""
        if self._line is None:
            self._line = self._find()
        if self._point is None:
            address = route.own_address(self._line.address)
            self._point = RendezvousStore(address, 0, self._secret)
            atexit.register(self._point.close)
            self._me = MemberAddress(self._name, self._host, address, self._point.port)
        return self._line

    def _find(self) -> StoreClient:
        some, why = False, "their processes have ended"
        for place in self._known():
            if (how := place.probe()) != ALIVE:
                some |= how == UNREACHABLE
                continue
            try:
                line, told = self._members_at(place)
            except LinkError as error:
                why = str(error)
                continue
            some, self._places = True, told
            if told[0].name == place.name:
                return line
            line.close()
            self._behind.append(told[0])
        if some:
            raise LinkError("the leader of the run cannot be reached")
        raise Over(f"{OVER} ({why})")

    def _members_at(self, place: MemberAddress) -> tuple[StoreClient, list[MemberAddress]]:
        """(a line there, the members that it knows of)."""
        line = StoreClient(place.address, place.port, self._secret, NO_RANK_YET, 0, TURN_S)
        with closed_on_error(line):
            return line, [MemberAddress.read(each.encode()) for each in json.loads(line.get(MEMBERS))]

    def _known(self) -> Iterator[MemberAddress]:
        """Where to look for who leads: whom one names is asked next."""
        self._behind = self._places[::-1]
        asked: set[str] = set()
        while self._behind:
            place = self._behind.pop()
            if place.name not in asked:
                asked.add(place.name)
                yield place

    def _ask(
        self, line: StoreClient, said: dict[str, Any], end: float, hear: Callable[[bytearray], object] | None = None
    ) -> dict[str, Any]:
        self._turn += 1
        notice_s = time.monotonic() + NOTICE_S
        said = {**said, "name": self._name, "host": self._host, "place": self._me.write(), "turn": self._turn}
        line.lease(GUEST + self._name, json.dumps(said))
        while time.monotonic() < end:
            self.glance()
            if time.monotonic() > notice_s:
                notice_s = math.inf
                self.activity.notice(
                    f"this node, {self._host}, has waited {NOTICE_S:.0f} s to be admitted by the run at "
                    f"{line.host}:{line.port}: its nodes answer between two steps"
                )
            if line.check([ANSWER + self._name]):
                told: dict[str, Any] = json.loads(line.get(ANSWER + self._name))
                if told.pop("turn") == self._turn:
                    if refused := told.get("refused"):
                        raise Refused(f"this node, {self._host}, was not taken in: {refused}")
                    return told
            if hear and self._bulk and self._bulk.waits(POLL_S):
                message = self._bulk.receive()
                try:
                    hear(message)
                except LinkError as error:  # another process of this node is lost, and no question mends that
                    raise Unheard(str(error)) from error
            else:
                time.sleep(POLL_S)
        raise LinkError("no answer")

    def take(self) -> bytearray:
        """The next message from the leader. Raises LinkError, also where it is lost, as all others notice: they meet
        without it, and wait for who is here."""
        assert self._bulk
        while not self._bulk.waits(POLL_S):
            if self._link:
                self._link.check_alive(0, "the state of those who train")
        return self._bulk.receive()

    def leave(self) -> None:
        """What it requested is forgotten: it is a member, or asks again by another line."""
        if self._line:
            self._line.close()
        if self._bulk:
            self._bulk.close()
        self._line = self._bulk = None

    def join(self, detect: transport.Detect, activity: Activity) -> Joined:
        """With what the last answer said: everyone, this one included."""
        decided, members = self._told["decided"], self._told["members"]
        host = MemberAddress.read(members[0].encode())
        joiners = [(MemberAddress.read(place.encode()), Joiner(**joiner)) for place, joiner in decided["guests"]]
        names = [*decided["names"], *(place.name for place, _ in joiners)]
        places = [*(MemberAddress.read(each.encode()) for each in members), *(place for place, _ in joiners)]
        rank, generation = names.index(self._name), int(decided["generation"])
        assert self._point
        meeting = StoreClient(host.address, host.port, self._secret, rank, len(names), TURN_S)
        meeting.patience_s = JOIN_S
        self._link = self._kind.of(meeting, generation, detect, activity)
        survivors = Reconfiguration(rank, places, generation, self._point, self._secret, int(self._told["least"]))
        return Joined(self._link, survivors, len(members), tuple(joiner for _, joiner in joiners))


def _awaited(path: Path) -> JoinTicket:
    """The ticket of a joining node, which may be a moment ahead of it. Raises LinkError where none comes."""
    limit_s = wait_s()
    end, waits = time.monotonic() + limit_s, False
    while not path.exists():
        if time.monotonic() >= end:
            raise LinkError(
                f"there is no run to join: no ticket at {path} within {limit_s:g} s; the run has ended, or its nodes "
                f"write their ticket elsewhere (PACELINE_TICKET_FILE)"
            )
        if not waits:
            waits = True
            log.info(f"this node waits for the ticket of the run, {path}, up to {limit_s:g} s")
        time.sleep(LONG_POLL_S)
    return JoinTicket.read(path)


class Over(LinkError):
    """There is nothing to come to."""


class Refused(LinkError):
    """They know who asks, and do not take it in."""


class Unheard(LinkError):
    """What they sent came, and could not be taken."""


class JoinClient:
    """``late``: the link of the process that has it. ``said``: what `consistency.digests` says of this one.

    ``glance``: called while it waits; may raise.
    """

    def __init__(self, run: RunState, late: JoiningLink | None, said: dict[str, str], glance: Callable[[], None]):
        self.run, self.late, self.said, self.glance = run, late, said, glance
        if late:
            late.glance = glance

    def hello(self) -> None:
        """Where training is. Raises LinkError where this node is refused, or the run has ended."""
        run = self.run
        run.cursor.epoch, run.cursor.next_step, run.cursor.began = self._ask({})["position"]
        run.cursor.resumed = True

    def _ask(self, more: dict[str, Any]) -> dict[str, Any]:
        """Every process of the node calls it, and hears what comes before the answer."""
        words, hand = b"", self.run.control.node_broadcast
        if self.late:
            limits = self.run.limits
            own = {"size": self.run.world.local_size, "least": limits.least[0], "most": limits.most[0]}
            reply = self.late.request({"said": self.said, **own}, more, lambda message: self._hear(hand(message)))
            words = json.dumps(reply).encode()
            hand(b"")  # which no message is
        else:
            while message := hand(b""):
                self._hear(message)
        told: dict[str, Any] = json.loads(bytes(hand(words)))
        return told

    def enter(self, epochs: int) -> bool:
        """False where the others have finished this call, of so many epochs. Every process of the node calls it."""
        run = self.run
        if "over" in self._ask({"began": run.cursor.began, "data": run.cursor.facts}):
            run.cursor.epoch, run.cursor.next_step = run.cursor.began + epochs, 0
            if self.late:
                self.late.leave()  # nobody reads here until it asks again, by another line
            return False
        run.control.enter()
        if not self.late:
            run.engine.reopen(None)
        while not self._hear(run.control.node_broadcast(self.late.take() if self.late else b"")):
            pass
        if self.late:
            self.late.leave()
            if desk := run.members.join_desk:
                desk.glance = self.glance
        # other masks than anybody has drawn before
        torch.manual_seed(run.job.seed * 100_003 + 1_009 * run.control.generation + run.world.rank)
        return True

    def _hear(self, message: bytes | bytearray) -> bool:
        """Whether it was the last."""
        said = state_transfer.read(bytearray(message) if isinstance(message, bytes) else message)
        if "pieces" in said:
            follow(self.run, said)
        if "part" in said:
            state_transfer.take_part(self.run, said)
        if "weights" in said:
            state_transfer.load(self.run, said)
        if "sizes" in said:
            state_transfer.adopt(self.run, said, self.run.control.rank)
        return "sizes" in said
