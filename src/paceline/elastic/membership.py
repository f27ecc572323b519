"""Membership of a run over a network: the link between its nodes, rebuilt when some failed or joined.

stand_by       each node leaves for the others where it can be met again, if losses are to end nothing
reconfigure    those who are left meet there, and decide who continues (`reconfigure`); over a link of theirs they do
joining        a node that comes late has no link but its own, until `reconfigure` gives it that of all
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import transport
from paceline.elastic.failure_detector import Heartbeat
from paceline.elastic.reconfigure import MemberAddress, Reconfiguration
from paceline.errors import LinkError
from paceline.link import gloo
from paceline.link.net.collective_override import agree_on, override
from paceline.link.net.metered import MeteredLink
from paceline.link.net.rendezvous import Unreached
from paceline.link.net.store_server import RendezvousStore
from paceline.registry import ALONE, find, module
from paceline.report.activity import BACK_S, Activity
from paceline.transport import JoinDesk, Joiner, Link, View

MAX_MEETINGS = 5  # after one loss, before the network itself is to blame


@dataclass(frozen=True)
class Joined:
    """What a node has once it was taken in. ``num_before``: of nodes that were there already."""

    link: gloo.Link
    survivors: Reconfiguration
    num_before: int
    guests: tuple[Joiner, ...]


Join = Callable[[transport.Detect, Activity], Joined]


def detect(activity: Activity) -> transport.Detect:
    """By a heartbeat, which also tells the others what this process is at."""
    return lambda rank, size, board, address, secret, alert: Heartbeat(
        rank, size, board, address, secret, activity, alert
    )


def connect(
    link: str, rank: int, size: int, host: str, port: int, generation: int = 0, collective: str = ""
) -> Members:
    """Of nodes that start together. Raises ValueError, LinkError, on all of them."""
    activity = Activity()
    made: Link = find("link", link, rank, size, host, port, generation, detect(activity), activity)
    agree_on(made, collective)
    return Members(made, activity, collective)


def alone() -> Members:
    """A process without a link to other nodes."""
    return Members(module("link", ALONE).world(1)[0], Activity())


def joining(activity: Activity, collective: str, join: Join) -> Members:
    """Of a node that comes late, which is alone until it is taken in; ``join`` waits for that."""
    return Members(module("link", ALONE).world(1)[0], activity, collective, join)


class Members(transport.Membership):
    """``link``, given: of the first members. ``collective``: by which all add up, where it is not the link's own.

    ``join``: of a node that comes late, waits until it is taken in.
    """

    def __init__(self, link: Link, activity: Activity, collective: str = "", join: Join | None = None):
        self.activity, self._collective, self._join = activity, collective, join
        self.expects_joiners = join is not None
        self._survivors: Reconfiguration | None = None
        self.link: MeteredLink
        self._take(link, 0)

    def _take(self, link: Link, spent: int) -> None:
        self.bare = link
        self.link = MeteredLink(override(link, self._collective), spent=spent)
        self.link.activity = self.activity

    def stand_by(self, least: int = 1) -> None:
        link = self.bare
        if self._join or link.size == 1:
            return
        if not isinstance(link, gloo.Link):
            super().stand_by(least)
            return
        address = link.members[link.rank].address
        point = RendezvousStore(address, 0, link.meeting.secret)
        atexit.register(point.close)
        mine = MemberAddress(f"{link.rank}-{secrets.token_hex(8)}", link.hosts[link.rank], address, point.port)
        link.store.set(f"place/{link.rank}", mine.write())
        texts = link.store.multi_get([f"place/{rank}" for rank in range(link.size)])
        places = [MemberAddress.read(text) for text in texts]
        self._survive(Reconfiguration(link.rank, places, link.generation, point, link.meeting.secret, least))

    def _survive(self, survivors: Reconfiguration) -> None:
        """From now on they decide who continues after a loss, and who is taken in."""
        self._survivors = survivors
        survivors.notice = self._notice
        self.activity.between_s = BACK_S

    def _notice(self, text: str) -> None:
        self.activity.notice(text)  # which another sets once all have joined

    def reconfigure(self, admits: Sequence[Joiner] = ()) -> View:
        if self._join:
            joined, self._join, self.expects_joiners = self._join(detect(self.activity), self.activity), None, False
            self._survive(joined.survivors)
            self._take(joined.link, self.link.sent_bytes)
            return View(self.link, tuple(range(joined.num_before)), joined.guests)
        link = self.bare
        if self._survivors is None or not isinstance(link, gloo.Link):
            raise LinkError("this link was not opened for elastic training")
        link.abandon()
        for _ in range(MAX_MEETINGS):
            meeting, generation, ranks = self._survivors.reconfigure(admits, self.activity.doubtful_s)
            admits = ()
            try:
                new = type(link).of(meeting, generation, detect(self.activity), self.activity)
            except LinkError as error:  # another one was lost meanwhile
                # where somebody new is there, it may be the one that nobody reaches: they meet without it first
                if isinstance(error, Unreached) and error.peer == meeting.rank and not self._survivors.came:
                    raise  # the others see it go, and meet without it
                failed = error
                continue
            joiners = tuple(joiner for _, joiner in self._survivors.came)
            self._survivors = self._survivors.among(ranks, generation)
            self._take(new, self.link.sent_bytes)
            return View(self.link, tuple(ranks), joiners)
        raise failed

    def assert_still_member(self, since: float) -> None:
        link = self.bare
        if isinstance(link, gloo.Link) and link.detector and not link.detector.still_member(since):
            raise link.failure("making sure that the others are still there", transport.boottime_s() - since, None)

    def peer_status(self) -> dict[int, dict[str, Any]]:
        return self.bare.detector.peer_status() if self.bare.detector else {}

    def peer_stack(self, rank: int) -> str:
        return self.bare.detector.peer_stack(rank) if self.bare.detector else ""

    @property
    def join_desk(self) -> JoinDesk | None:
        return self._survivors
