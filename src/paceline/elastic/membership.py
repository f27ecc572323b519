"""Membership of a run over a network: the link between its nodes, rebuilt when some failed or joined.

stand_by       each node publishes the address where the others find it after a failure, if failures are to be survived
reconfigure    the survivors rendezvous there, decide which continue (`reconfigure`), and open a link between these
joining        a joining node has no link but its own, until `reconfigure` gives it that of all members
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

MAX_RENDEZVOUS = 5  # after one failure, before the network itself is the cause


@dataclass(frozen=True)
class Joined:
    """What an admitted node has. ``num_before``: the number of members before it joined."""

    link: gloo.Link
    reconfiguration: Reconfiguration
    num_before: int
    joiners: tuple[Joiner, ...]


Join = Callable[[transport.Detect, Activity], Joined]


def detect(activity: Activity) -> transport.Detect:
    """By a heartbeat, which also reports to the others what this process is doing."""
    return lambda rank, size, board, address, secret, alert: Heartbeat(
        rank, size, board, address, secret, activity, alert
    )


def connect(
    link: str, rank: int, size: int, host: str, port: int, generation: int = 0, collective: str = ""
) -> Members:
    """The membership of nodes that start together. Raises ValueError, LinkError, on all of them."""
    activity = Activity()
    opened: Link = find("link", link, rank, size, host, port, generation, detect(activity), activity)
    agree_on(opened, collective)
    return Members(opened, activity, collective)


def alone() -> Members:
    """A process without a link to other nodes."""
    return Members(module("link", ALONE).world(1)[0], Activity())


def joining(activity: Activity, collective: str, join: Join) -> Members:
    """The membership of a joining node, which is alone until it is admitted; ``join`` waits for that."""
    return Members(module("link", ALONE).world(1)[0], activity, collective, join)


class Members(transport.Membership):
    """``link``: that of the first members. ``collective``: the all-reduce algorithm, if it is not the link's own.
    ``join``: of a joining node, waits until it is admitted."""

    def __init__(self, link: Link, activity: Activity, collective: str = "", join: Join | None = None):
        self.activity, self._collective, self._join = activity, collective, join
        self.expects_joiners = join is not None
        self._reconfiguration: Reconfiguration | None = None
        self.link: MeteredLink
        self._use(link, 0)

    def _use(self, link: Link, spent: int) -> None:
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
        store = RendezvousStore(address, 0, link.meeting.secret)
        atexit.register(store.close)
        mine = MemberAddress(f"{link.rank}-{secrets.token_hex(8)}", link.hosts[link.rank], address, store.port)
        link.store.set(f"place/{link.rank}", mine.write())
        texts = link.store.multi_get([f"place/{rank}" for rank in range(link.size)])
        members = [MemberAddress.read(text) for text in texts]
        self._survive(Reconfiguration(link.rank, members, link.generation, store, link.meeting.secret, least))

    def _survive(self, reconfiguration: Reconfiguration) -> None:
        """From now on it decides which nodes continue after a failure, and which are admitted."""
        self._reconfiguration = reconfiguration
        reconfiguration.notice = self._notice
        self.activity.between_s = BACK_S

    def _notice(self, text: str) -> None:
        self.activity.notice(text)  # which `Training` sets once all have joined

    def reconfigure(self, admits: Sequence[Joiner] = ()) -> View:
        if self._join:
            joined, self._join, self.expects_joiners = self._join(detect(self.activity), self.activity), None, False
            self._survive(joined.reconfiguration)
            self._use(joined.link, self.link.sent_bytes)
            return View(self.link, tuple(range(joined.num_before)), joined.joiners)
        link = self.bare
        if self._reconfiguration is None or not isinstance(link, gloo.Link):
            raise LinkError("this link was not opened for elastic training")
        link.abandon()
        for _ in range(MAX_RENDEZVOUS):
            store, generation, ranks = self._reconfiguration.reconfigure(admits, self.activity.suspended_s)
            admits = ()
            try:
                new = type(link).of(store, generation, detect(self.activity), self.activity)
            except LinkError as error:  # another node has failed meanwhile
                # if a node joins, it may be the one that the others cannot reach: they first rendezvous without it
                if isinstance(error, Unreached) and error.peer == store.rank and not self._reconfiguration.joined:
                    raise  # the others detect that this process ends, and rendezvous without it
                failed = error
                continue
            joiners = tuple(joiner for _, joiner in self._reconfiguration.joined)
            self._reconfiguration = self._reconfiguration.successor(ranks, generation)
            self._use(new, self.link.sent_bytes)
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
        return self._reconfiguration
