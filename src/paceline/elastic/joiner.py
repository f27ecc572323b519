"""A joining node: alone until the members of the run admit it between two of their steps.

    request   to the store of the leader, repeated, one request at a time
    response  the reason of a refusal; or, after the rendezvous, all members and the rank of this node among them
    rebuild   the link that all have from then on

A process that sends a request has authenticated with the run's secret. Its request ends with its connection.

A joining node before it is admitted:

    join       builds all that is its own, and requests the position of the training
    batches    waits until it is admitted, and takes over the state that all share; its first batch is the members' next
    before     it is alone: what it saves or evaluates concerns no other node

A call of `batches` that the members have finished yields nothing here, so that scripts with several calls stay in step.
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
from paceline.elastic.bulk_channel import BulkChannel, connect_bulk
from paceline.elastic.catch_up import apply_update
from paceline.elastic.membership import Joined
from paceline.elastic.quorum import ALIVE, UNREACHABLE
from paceline.elastic.reconfigure import JOIN_S, MEMBERS, NEW, REQUEST, RESPONSE, TRY_S, MemberAddress, Reconfiguration
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

TIMEOUT_S = 1800.0  # for members that are alive and do not answer before their step has ended
POLL_S, LONG_POLL_S = 0.02, 0.2
OVER_S = 10.0  # for which no member must answer: a firewall may refuse connections for a moment
NOTICE_S = 10.0  # before a log line about a wait for a response
OVER = "no member of the run answers any more; the run has ended, or look at its nodes"

Handler = Callable[[bytearray], object]


class JoiningLink:
    """``ticket``: of the run. ``node``: the number of this node, if it belonged to the run before. ``kind``: the
    link's. Raises ValueError where the run is encrypted and that link is not, or the reverse."""

    def __init__(self, ticket: Path, node: str = "", kind: type[Link] = Link):
        self.activity = Activity(BACK_S)  # the members have measured their steps
        self._link: Link | None = None
        self._ticket, found, self._kind = ticket, _wait_for(ticket), kind
        if found.hides != kind.hides:
            theirs, mine = ("with", "without") if found.hides else ("without", "with")
            raise ValueError(
                f"{ticket} is of a run that was started {theirs} --encrypt, and this node was started {mine}; start it "
                f"as the others (PACELINE_ENCRYPT)"
            )
        self._secret = EncryptionKey(found.secret.encode()) if found.hides else found.secret.encode()
        secret_of_environment()  # child processes do not get it
        self._members = [MemberAddress.read(each.encode()) for each in found.members]
        self._queue: list[MemberAddress] = []
        self._name = f"{node or NEW}-{secrets.token_hex(8)}"
        self._host = os.environ.get("PACELINE_HOST", socket.gethostname())
        self._leader: StoreClient | None = None
        self._store: RendezvousStore | None = None
        self._bulk: BulkChannel | None = None
        self._turn, self._response = 0, dict[str, Any]()
        self.glance: Callable[[], None] = lambda: None  # while waiting: raises where waiting is to end

    def request(
        self, identity: dict[str, Any], more: dict[str, Any] | None = None, handle: Handler | None = None
    ) -> dict[str, Any]:
        """The leader's response to ``identity``, and then to ``more``. ``handle`` takes the messages before the latter.
        A later leader gets new requests. Raises LinkError where it refuses, or no member is left that could respond."""
        end, why, over_s = time.monotonic() + TIMEOUT_S, "no response", math.inf
        while time.monotonic() < end:
            try:
                leader = self._connect()
                if self._bulk is None:
                    self._response = self._send(leader, identity, end)
                    address, port = self._response["hatch"]
                    self._bulk = connect_bulk(address, port, self._secret, self._name)
                if more:
                    self._response = self._send(leader, {**identity, **more}, end, handle)
                return self._response
            except Over:
                self.leave()
                over_s = min(over_s, time.monotonic())
                if time.monotonic() - over_s > OVER_S:
                    self._ticket.unlink(missing_ok=True)  # no process tries again
                    raise
                self.glance()
                time.sleep(LONG_POLL_S)
            except (Refused, Unhandled):
                self.leave()
                raise
            except LinkError as error:
                why, over_s = str(error), math.inf
                self.leave()
                self.glance()
                time.sleep(LONG_POLL_S)
        raise LinkError(f"this node, {self._host}, got no response within {TIMEOUT_S:.0f} s ({why}); look there")

    def _connect(self) -> StoreClient:
        """A connection to the leader. Opens this node's own store, at the address by which the leader reaches it."""
        if self._leader is None:
            self._leader = self._find()
        if self._store is None:
            address = route.own_address(self._leader.address)
            self._store = RendezvousStore(address, 0, self._secret)
            atexit.register(self._store.close)
            self._me = MemberAddress(self._name, self._host, address, self._store.port)
        return self._leader

    def _find(self) -> StoreClient:
        unreachable, why = False, "their processes have ended"
        for member in self._candidates():
            if (how := member.probe()) != ALIVE:
                unreachable |= how == UNREACHABLE
                continue
            try:
                connection, members = self._members_at(member)
            except LinkError as error:
                why = str(error)
                continue
            unreachable, self._members = True, members
            if members[0].name == member.name:
                return connection
            connection.close()
            self._queue.append(members[0])
        if unreachable:
            raise LinkError("the leader of the run cannot be reached")
        raise Over(f"{OVER} ({why})")

    def _members_at(self, member: MemberAddress) -> tuple[StoreClient, list[MemberAddress]]:
        """(a connection to that member, the members that it knows)."""
        connection = StoreClient(member.address, member.port, self._secret, NO_RANK_YET, 0, TRY_S)
        with closed_on_error(connection):
            return connection, [MemberAddress.read(each.encode()) for each in json.loads(connection.get(MEMBERS))]

    def _candidates(self) -> Iterator[MemberAddress]:
        """Where to look for the leader: the one that a member names comes next."""
        self._queue = self._members[::-1]
        tried: set[str] = set()
        while self._queue:
            member = self._queue.pop()
            if member.name not in tried:
                tried.add(member.name)
                yield member

    def _send(
        self, leader: StoreClient, request: dict[str, Any], end: float, handle: Handler | None = None
    ) -> dict[str, Any]:
        self._turn += 1
        notice_s = time.monotonic() + NOTICE_S
        request = {**request, "name": self._name, "host": self._host, "place": self._me.write(), "turn": self._turn}
        leader.lease(REQUEST + self._name, json.dumps(request))
        while time.monotonic() < end:
            self.glance()
            if time.monotonic() > notice_s:
                notice_s = math.inf
                self.activity.notice(
                    f"this node, {self._host}, has waited {NOTICE_S:.0f} s to be admitted by the run at "
                    f"{leader.host}:{leader.port}: its nodes respond between two steps"
                )
            if leader.check([RESPONSE + self._name]):
                response: dict[str, Any] = json.loads(leader.get(RESPONSE + self._name))
                if response.pop("turn") == self._turn:
                    if refused := response.get("refused"):
                        raise Refused(f"this node, {self._host}, was not admitted: {refused}")
                    return response
            if handle and self._bulk and self._bulk.waits(POLL_S):
                message = self._bulk.receive()
                try:
                    handle(message)
                except LinkError as error:  # another process of this node has failed: no new request helps
                    raise Unhandled(str(error)) from error
            else:
                time.sleep(POLL_S)
        raise LinkError("no response")

    def take(self) -> bytearray:
        """The next message from the leader. Raises LinkError, also if the leader fails. The other members notice that,
        too: they rendezvous without it, and wait for this node."""
        assert self._bulk
        while not self._bulk.waits(POLL_S):
            if self._link:
                self._link.check_alive(0, "the state of the members")
        return self._bulk.receive()

    def leave(self) -> None:
        """Ends its request: it is a member, or sends another request over a new connection."""
        if self._leader:
            self._leader.close()
        if self._bulk:
            self._bulk.close()
        self._leader = self._bulk = None

    def join(self, detect: transport.Detect, activity: Activity) -> Joined:
        """Joins the members that the last response names, of which this node is one."""
        decided, members = self._response["decided"], self._response["members"]
        host = MemberAddress.read(members[0].encode())
        joiners = [(MemberAddress.read(text.encode()), Joiner(**joiner)) for text, joiner in decided["guests"]]
        names = [*decided["names"], *(member.name for member, _ in joiners)]
        addresses = [*(MemberAddress.read(each.encode()) for each in members), *(member for member, _ in joiners)]
        rank, generation = names.index(self._name), int(decided["generation"])
        assert self._store
        store = StoreClient(host.address, host.port, self._secret, rank, len(names), TRY_S)
        store.patience_s = JOIN_S
        self._link = self._kind.of(store, generation, detect, activity)
        least = int(self._response["least"])
        reconfiguration = Reconfiguration(rank, addresses, generation, self._store, self._secret, least)
        return Joined(self._link, reconfiguration, len(members), tuple(joiner for _, joiner in joiners))


def _wait_for(path: Path) -> JoinTicket:
    """The join token, which may be written a moment after this node starts. Raises LinkError where none is."""
    limit_s = wait_s()
    end, logged = time.monotonic() + limit_s, False
    while not path.exists():
        if time.monotonic() >= end:
            raise LinkError(
                f"there is no run to join: no ticket at {path} within {limit_s:g} s; the run has ended, or its nodes "
                f"write their ticket elsewhere (PACELINE_TICKET_FILE)"
            )
        if not logged:
            logged = True
            log.info(f"this node waits for the ticket of the run, {path}, up to {limit_s:g} s")
        time.sleep(LONG_POLL_S)
    return JoinTicket.read(path)


class Over(LinkError):
    """There is no run to join."""


class Refused(LinkError):
    """The leader does not admit this node."""


class Unhandled(LinkError):
    """A message from the leader arrived, and could not be applied."""


class JoinClient:
    """``link``: of the process that holds it. ``digests``: those of this node's job (`consistency.digests`).
    ``glance``: called while it waits; may raise."""

    def __init__(self, run: RunState, link: JoiningLink | None, digests: dict[str, str], glance: Callable[[], None]):
        self.run, self.link, self.digests, self.glance = run, link, digests, glance
        if link:
            link.glance = glance

    def request_position(self) -> None:
        """Learns at which step the training is. Raises LinkError where this node is refused, or the run has ended."""
        run = self.run
        run.cursor.epoch, run.cursor.next_step, run.cursor.began = self._request({})["position"]
        run.cursor.resumed = True

    def _request(self, more: dict[str, Any]) -> dict[str, Any]:
        """Every process of the node calls it, and handles the messages before the response."""
        packed, broadcast = b"", self.run.control.node_broadcast
        if self.link:
            limits = self.run.limits
            own = {"size": self.run.world.local_size, "least": limits.least[0], "most": limits.most[0]}
            identity = {"said": self.digests, **own}
            packed = json.dumps(self.link.request(identity, more, lambda each: self._handle(broadcast(each)))).encode()
            broadcast(b"")  # no message is empty: this ends them
        else:
            while message := broadcast(b""):
                self._handle(message)
        response: dict[str, Any] = json.loads(bytes(broadcast(packed)))
        return response

    def enter(self, epochs: int) -> bool:
        """False if the members have finished this call of so many epochs. Every process of the node calls it."""
        run = self.run
        if "over" in self._request({"began": run.cursor.began, "data": run.cursor.facts}):
            run.cursor.epoch, run.cursor.next_step = run.cursor.began + epochs, 0
            if self.link:
                self.link.leave()  # no process reads here until it sends another request, over a new connection
            return False
        run.control.enter()
        if not self.link:
            run.engine.reopen(None)
        while not self._handle(run.control.node_broadcast(self.link.take() if self.link else b"")):
            pass
        if self.link:
            self.link.leave()
            if desk := run.members.join_desk:
                desk.glance = self.glance
        # dropout masks that no process has drawn before
        torch.manual_seed(run.job.seed * 100_003 + 1_009 * run.control.generation + run.world.rank)
        return True

    def _handle(self, message: bytes | bytearray) -> bool:
        """Whether it was the last message."""
        state = state_transfer.read(bytearray(message) if isinstance(message, bytes) else message)
        if "pieces" in state:
            apply_update(self.run, state)
        if "part" in state:
            state_transfer.load_part(self.run, state)
        if "weights" in state:
            state_transfer.load(self.run, state)
        if "sizes" in state:
            state_transfer.adopt(self.run, state, self.run.control.rank)
        return "sizes" in state
