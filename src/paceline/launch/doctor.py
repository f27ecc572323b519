"""All hosts examined at once: what each says, who reaches whom, how fast; then `findings` says what is wrong.

come (facts)   clock   settle   reach   software        cross, pair by pair
LIMIT_S        each within ANSWER_S     until OVER_S    until OVER_S, FLOOD_S each way
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from paceline.launch import facts
from paceline.launch.calls import Calls
from paceline.launch.check import LIMIT_S
from paceline.launch.findings import IN_THE_WAY, Finding, diagnose, meeting
from paceline.launch.hosts import Host, Way
from paceline.launch.visit import Visit

ANSWER_S = 3.0
REACH_S = 2.0
OVER_S = 8.5  # from the beginning: what takes longer is told as that
CROSSING_S = 3.0
FLOOD_S = 0.1, 0.5  # at least and at most
CLOCKS = 5

T = TypeVar("T")


@dataclass(frozen=True)
class Examination:
    """``hosts``: what each says of itself, or its ``fault``. ``pairs``: what passed ``from`` one ``to`` another."""

    hosts: Mapping[str, Mapping[str, Any]]
    pairs: Sequence[Mapping[str, Any]]
    findings: Sequence[Finding]

    @property
    def ready(self) -> bool:
        return not any(finding.weight == IN_THE_WAY for finding in self.findings)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "ready": self.ready}


def examine(
    hosts: Sequence[Host] | None, way: Way, address: str = "", port: int = 0, show: Callable[[str], None] = print
) -> Examination:
    """Of these hosts; None: of this machine alone. ``show`` is told what is being done.

    address     where the nodes would meet, as every host sees it; else where ssh reached the first
    port        which the first must be able to take; 0: any
    """
    mine = facts.tell(way.folder, [])
    ward = _Ward(hosts, way)
    with Calls():  # SIGTERM closes it as Ctrl-C does
        try:
            show(f"asking {', '.join(ward.told)}")
            ward.come()
            ward.settle(address, port)
            show("trying the ways between them")
            ward.reach()
            ward.software()
            show("measuring the ways between them")
            ward.cross()
        finally:
            ward.close()
    return Examination(ward.told, ward.pairs, diagnose(mine, ward.told, ward.pairs, way))


class _Ward:
    """The hosts, and what has been found so far. Who does not answer has a ``fault``, and is asked no more."""

    def __init__(self, hosts: Sequence[Host] | None, way: Way):
        self._begin = time.monotonic()
        self._alone, self._way = hosts is None, way
        self._hosts = [Host(socket.gethostname(), "")] if hosts is None else list(hosts)
        self._visits: dict[str, Visit] = {}
        self._crowd = ThreadPoolExecutor(len(self._hosts))
        self.told: dict[str, dict[str, Any]] = {host.name: {} for host in self._hosts}
        self.pairs: list[dict[str, Any]] = []

    @property
    def _well(self) -> list[str]:
        return [name for name, told in self.told.items() if "fault" not in told]

    def _each(self, what: Callable[[str], T], names: Sequence[str]) -> dict[str, T]:
        """Of all of them at once."""

        def one(name: str) -> list[T]:
            try:
                return [what(name)]
            except ConnectionError as error:
                self.told[name] = {"fault": str(error)}
                return []

        return {name: answers[0] for name, answers in zip(names, self._crowd.map(one, names), strict=True) if answers}

    def come(self) -> None:
        def ask(name: str) -> dict[str, Any]:
            (host,) = (host for host in self._hosts if host.name == name)
            self._visits[name] = visit = Visit(host, self._way, self._alone)
            told: dict[str, Any] = visit.ask("tell", LIMIT_S, folder=self._way.folder)
            return {**told, **_clock(visit)}

        self.told |= self._each(ask, list(self.told))

    def settle(self, address: str, port: int) -> None:
        """Each has an address of its own, and listens there."""
        if not (names := self._well):
            return
        where = address or self.told[names[0]]["address"] or "127.0.0.1"
        same = {
            "meeting": where,
            "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
            "secret": secrets.token_hex(32),
        }

        def ask(name: str) -> dict[str, Any]:
            first = name == names[0]
            wanted = port if first else 0
            found: dict[str, Any] = self._visits[name].ask("open", ANSWER_S, **same, first=first, port=wanted)
            return {**found, "asked": address, "asked_port": wanted}

        for name, place in self._each(ask, names).items():
            self.told[name]["place"] = place

    def reach(self) -> None:
        """Everyone tries everyone, unless it is plain that they look for each other at home."""
        if any(meeting({name: self.told[name] for name in self._well})):
            return
        places = {name: self.told[name]["place"] for name in self._well}
        doors = {name: [place["address"], place["port"]] for name, place in places.items() if "port" in place}

        def ask(name: str) -> dict[str, str]:
            peers = {peer: door for peer, door in doors.items() if self._alone or peer != name}
            found: dict[str, str] = self._visits[name].ask("reach", REACH_S + ANSWER_S, peers=peers, patience_s=REACH_S)
            return found

        for one, reached in self._each(ask, list(doors)).items():
            self.pairs += [{"from": one, "to": other, "why": why} for other, why in reached.items()]

    def software(self) -> None:
        left_s = max(1.0, self._begin + OVER_S - time.monotonic())
        answers = self._each(lambda name: self._visits[name].ask("software", left_s + 1, patience_s=left_s), self._well)
        for name, answer in answers.items():
            self.told[name]["software"] = answer

    def cross(self) -> None:
        """Those that reach each other: no host in two crossings at a time, each direction by itself."""
        good = {(pair["from"], pair["to"]): pair for pair in self.pairs if not pair["why"]}
        names = [name for name in self._well if any(name in pair for pair in good)]
        turns = [[(name, name) for name in names]] if self._alone else rounds(names)
        left_s = min(CROSSING_S, self._begin + OVER_S - time.monotonic())
        seconds = min(FLOOD_S[1], max(FLOOD_S[0], left_s / (2 * max(1, len(turns)))))

        for turn in turns:
            for direction in (turn, [(other, one) for one, other in turn if one != other]):
                peers = {one: other for one, other in direction if (one, other) in good and (other, one) in good}

                def ask(name: str, peers: Mapping[str, str] = peers) -> dict[str, Any]:
                    place = self.told[peers[name]]["place"]
                    words = {"address": place["address"], "port": place["port"], "seconds": seconds}
                    found: dict[str, Any] = self._visits[name].ask("measure", 4 * ANSWER_S + 2 * seconds, **words)
                    return found

                here = [one for one, other in peers.items() if {one, other} <= set(self._well)]
                for one, found in self._each(ask, here).items():
                    good[one, peers[one]].update(found)

    def close(self) -> None:
        for visit in list(self._visits.values()):
            visit.close()
        self._crowd.shutdown()
        self.pairs = [pair for pair in self.pairs if {pair["from"], pair["to"]} <= set(self._well)]


def _clock(visit: Visit) -> dict[str, float]:
    """Its clock minus ours, as of the middle of the quickest of a few questions; and how far that may be wrong."""
    best_s, skew_s = float("inf"), 0.0
    for _ in range(CLOCKS):
        start, begin = time.time(), time.perf_counter()
        theirs = visit.ask("clock", ANSWER_S)
        took_s = time.perf_counter() - begin
        if took_s < best_s:
            best_s, skew_s = took_s, theirs - start - took_s / 2
    return {"skew_s": skew_s, "skew_error_s": best_s / 2}


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every pair once, in rounds in which nobody has two: all but one sit in a circle that turns."""
    seats = [*names, *([""] if len(names) % 2 else [])]
    turns = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        turns.append([(one, other) for one, other in pairs if one and other])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return turns
