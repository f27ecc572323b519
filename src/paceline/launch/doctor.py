"""All hosts examined at once: what each says, who reaches whom, how fast; then `findings` says what is wrong.

    hosts   facts ........ clock . open . reach ......... software .......... measure, pair by pair
    limits  LIMIT_S        each within ANSWER_S           until SOFTWARE_S    CROSSING_S in all
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from paceline.launch import facts
from paceline.launch.check import LIMIT_S
from paceline.launch.findings import IN_THE_WAY, Finding, diagnose, meeting
from paceline.launch.hosts import Host, Way
from paceline.launch.visit import Visit

ANSWER_S = 3.0
REACH_S = 2.0
SOFTWARE_S = 8.0  # from the beginning
CROSSING_S = 4.0
FLOOD_S = 0.1, 0.5  # at least and at most, each way
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
    begin = time.monotonic()
    alone = hosts is None
    asked = [Host(socket.gethostname(), "")] if hosts is None else list(hosts)
    mine = facts.tell(way.folder, [])
    told: dict[str, dict[str, Any]] = {host.name: {} for host in asked}
    pairs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(len(asked)) as crowd, ExitStack() as house:

        def each(what: Callable[[Host], T], among: Sequence[Host]) -> dict[str, T]:
            """Of all at once; who fails is out of it from then on."""

            def one(host: Host) -> T | None:
                try:
                    return what(host)
                except ConnectionError as error:
                    told[host.name] = {"fault": str(error)}
                    return None

            answers = zip(among, list(crowd.map(one, among)), strict=True)
            return {host.name: answer for host, answer in answers if answer is not None}

        visits: dict[str, Visit] = {}

        def come(host: Host) -> Any:
            visits[host.name] = visit = Visit(host, way, alone)
            house.callback(visit.close)
            return visit.ask("tell", LIMIT_S, folder=way.folder)

        show(f"asking {', '.join(host.name for host in asked)}")
        for name, answer in each(come, asked).items():
            told[name] = answer
        well = [host for host in asked if "fault" not in told[host.name]]
        for name, clock in each(lambda host: _clock(visits[host.name]), well).items():
            told[name] |= clock
        well = [host for host in well if "fault" not in told[host.name]]
        if well:
            where = address or told[well[0].name]["address"] or "127.0.0.1"
            secret = secrets.token_hex(32)

            def settle(host: Host) -> dict[str, Any]:
                first = host is well[0]
                words = {"meeting": where, "first": first, "interface": os.environ.get("GLOO_SOCKET_IFNAME", "")}
                words |= {"port": port if first else 0, "secret": secret}
                found: dict[str, Any] = visits[host.name].ask("open", ANSWER_S, **words)
                return {**found, "asked": address, "asked_port": words["port"]}

            for name, place in each(settle, well).items():
                told[name]["place"] = place
            trapped = list(meeting({host.name: told[host.name] for host in well}))
            open_ = [] if trapped else [host for host in well if "port" in told[host.name].get("place", {})]
            show("trying the ways between them")
            ways = each(lambda host: _reach(visits[host.name], host, open_, told, alone), open_)
            pairs = [{"from": one, "to": other, "why": why} for one in ways for other, why in ways[one].items()]
            left_s = max(1.0, begin + SOFTWARE_S - time.monotonic())
            well = [host for host in well if "fault" not in told[host.name]]
            software = each(lambda host: visits[host.name].ask("software", left_s + 1, limit_s=left_s), well)
            for name, answer in software.items():
                told[name]["software"] = answer
            show("measuring the ways between them")
            _measure(each, visits, told, pairs)
    pairs = [pair for pair in pairs if "fault" not in {**told[pair["from"]], **told[pair["to"]]}]
    return Examination(told, pairs, diagnose(mine, told, pairs, way))


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


def _reach(
    visit: Visit, host: Host, among: Sequence[Host], told: Mapping[str, Mapping[str, Any]], alone: bool
) -> dict[str, str]:
    places = {peer.name: told[peer.name]["place"] for peer in among if alone or peer is not host}
    peers = {name: [place["address"], place["port"]] for name, place in places.items()}
    found: dict[str, str] = visit.ask("reach", REACH_S + ANSWER_S, peers=peers, limit_s=REACH_S)
    return found


def _measure(
    each: Callable[[Callable[[Host], Any], Sequence[Host]], Mapping[str, Any]],
    visits: Mapping[str, Visit],
    told: Mapping[str, Mapping[str, Any]],
    pairs: Sequence[dict[str, Any]],
) -> None:
    """Into ``pairs``: those that reach each other, no host in two crossings at a time, each direction by itself."""
    good = {(pair["from"], pair["to"]): pair for pair in pairs if not pair["why"]}
    names = list(dict.fromkeys(name for pair in good for name in pair))
    turns = [[(names[0], names[0])]] if (names and (names[0], names[0]) in good) else rounds(names)
    seconds = min(FLOOD_S[1], max(FLOOD_S[0], CROSSING_S / (2 * len(turns) or 1)))
    for turn in turns:
        for direction in (turn, [(other, one) for one, other in turn if one != other]):
            peers = {one: other for one, other in direction if (one, other) in good and (other, one) in good}
            peers = {one: other for one, other in peers.items() if "place" in told[one] and "place" in told[other]}

            def cross(host: Host, peers: Mapping[str, str] = peers) -> Any:
                place = told[peers[host.name]]["place"]
                words = {"address": place["address"], "port": place["port"], "seconds": seconds}
                return visits[host.name].ask("measure", 4 * ANSWER_S + 2 * seconds, **words)

            for one, found in each(cross, [visits[one].host for one in peers]).items():
                good[one, peers[one]].update(found)


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
