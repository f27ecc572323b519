"""Examines all hosts at once: what each reports, which reach which, how fast; then `findings` names the problems.

seconds   0 ................. 5.5 ................................................ 8.5
          come: facts, clock      settle, reach 2, software, cross pair by pair
          ................................................... late software, who comes late

Each phase ends when all have answered, at the latest then; what no time is left for is reported as that.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from paceline.launch.child_processes import ChildProcesses
from paceline.launch.doctor import host_facts
from paceline.launch.doctor.findings import IN_THE_WAY, SLOW, Finding, diagnose, meeting
from paceline.launch.doctor.remote_session import RemoteSession
from paceline.launch.hosts import Host, Way

COME_S, ALONE_S, OVER_S = 5.5, 7.0, 8.5  # from the beginning: the latest ends; see `come`
CALM_S = 6.5  # likewise, until when nothing is measured beside torch's import
REACH_S = 2.0
BACK_S = 0.3  # in which a host's answer comes through, beyond the time that it is given
MIN_S = 0.6  # in which something can be found out
CROSSING_S = 3.0
FLOOD_S = 0.1, 0.5  # at least and at most
CLOSE_S = 0.5
CLOCKS = 5

T = TypeVar("T")


@dataclass(frozen=True)
class Examination:
    """``hosts``: what each says of itself, or its ``fault``. ``pairs``: what passed ``from`` one ``to`` another.

    ``took_s``: from the beginning until nothing was left to end.
    """

    hosts: Mapping[str, Mapping[str, Any]]
    pairs: Sequence[Mapping[str, Any]]
    findings: Sequence[Finding]
    took_s: float

    @property
    def ready(self) -> bool:
        return not any(finding.weight == IN_THE_WAY for finding in self.findings)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "ready": self.ready}


def examine(
    hosts: Sequence[Host] | None, way: Way, address: str = "", port: int = 0, show: Callable[[str], None] = print
) -> Examination:
    """Of these hosts; None: of this machine alone. ``show`` gets what is being done.

    address     where the nodes would meet, as every host sees it; else where ssh reached the first
    port        which the first must be able to take; 0: any
    """
    ward = _HostExam(hosts, way)
    mine = host_facts.tell(way.folder, [])
    with ChildProcesses():  # SIGTERM closes it as Ctrl-C does
        try:
            show(f"asking {', '.join(ward.told)}")
            ward.come()
            ward.settle(address, port)
            show("trying the ways between them")
            ward.reach()
            show("importing torch on each")
            ward.software(CALM_S)
            show("measuring the ways between them")
            ward.cross()
            ward.software(OVER_S - BACK_S)
            ward.linger()
        finally:
            ward.close()
    found = diagnose(mine, ward.told, ward.pairs, way)
    for weight, what in ward.hurried:
        text = f"no time was left for {what}; ask fewer hosts at once, or without those that do not answer"
        found.append(Finding(weight, "all", text))
    found.sort(key=lambda finding: finding.weight)
    return Examination(ward.told, ward.pairs, found, ward.took_s)


class _HostExam:
    """The hosts, and what has been found so far. A host that does not answer has a ``fault``, and is asked no more."""

    def __init__(self, hosts: Sequence[Host] | None, way: Way):
        self._begin = time.monotonic()
        self._alone, self._way = hosts is None, way
        self._hosts = [Host(socket.gethostname(), "")] if hosts is None else list(hosts)
        self._visits: dict[str, RemoteSession] = {}
        self._crowd = ThreadPoolExecutor(len(self._hosts))
        self.told: dict[str, dict[str, Any]] = {host.name: {} for host in self._hosts}
        self.pairs: list[dict[str, Any]] = []
        self.hurried: list[tuple[int, str]] = []  # what no time was left for, and how heavy that weighs
        self._coming: list[Future[None]] = []
        self._here: list[str] = []
        self._lock, self._over = threading.Lock(), False

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._begin

    def _ask(self, name: str, order: str, by_s: float, **words: Any) -> Any:
        """``by_s``: from the beginning. Raises ConnectionError, TimeoutError."""
        return self._visits[name].ask(order, by_s - self.took_s, **words)

    @property
    def _well(self) -> list[str]:
        return [name for name in self._here if "fault" not in self.told[name]]

    def _each(self, doing: str, what: Callable[[str], T], names: Sequence[str], weight: int = SLOW) -> dict[str, T]:
        """Of all of them at once. One that is merely late has no fault: it may be busy."""

        def one(name: str) -> list[T]:
            try:
                return [what(name)]
            except TimeoutError:
                self.hurried.append((weight, f"{doing} {name}"))
            except ConnectionError as error:
                self.told[name] = {"fault": str(error)}
            return []

        return {name: answers[0] for name, answers in zip(names, self._crowd.map(one, names), strict=True) if answers}

    def come(self) -> None:
        """Waits for all until COME_S, and until ALONE_S where there are not two yet; the ways of later ones are not
        tried."""

        def ask(host: Host) -> None:
            try:
                visit = self._begin_visit(host)
                facts = self._ask(host.name, "tell", OVER_S, folder=self._way.folder)
                self.told[host.name] = {**facts, **_clock(visit, self._begin + OVER_S)}
            except (ConnectionError, TimeoutError) as error:
                self.told[host.name] = {"fault": str(error)}

        self._coming = [self._crowd.submit(ask, host) for host in self._hosts]
        for until_s in (COME_S, ALONE_S):
            if len(self._well) < 2:
                wait(self._coming, until_s - self.took_s)
            self._here = [name for name, told in self.told.items() if told]

    def _begin_visit(self, host: Host) -> RemoteSession:
        """Raises ConnectionError where `close`, which ends all that have begun, has been called meanwhile."""
        visit = RemoteSession(host, self._way, self._alone)
        with self._lock:
            if not self._over:
                self._visits[host.name] = visit
                return visit
        visit.close(0.0)
        raise ConnectionError("the examination was ended")

    def linger(self) -> None:
        """For those that are late."""
        wait(self._coming)  # none is asked longer than until OVER_S
        late = [name for name, told in self.told.items() if "fault" not in told and name not in self._here]
        self.hurried += [(IN_THE_WAY, f"the ways to and from {name}, which came late") for name in late]

    def settle(self, address: str, port: int) -> None:
        """Each has an address of its own, and listens there."""
        if not (names := self._well):
            return
        nccls = os.environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
        where = address or self.told[names[0]]["address"] or "127.0.0.1"
        same = {
            "meeting": where,
            "interface": os.environ.get("GLOO_SOCKET_IFNAME") or (nccls and f"={nccls}"),
            "secret": secrets.token_hex(32),
        }

        def ask(name: str) -> dict[str, Any]:
            wanted = port if name == names[0] else 0
            found = self._ask(name, "open", OVER_S, **same, first=name == names[0], port=wanted)
            return {**found, "asked": address, "asked_port": wanted}

        for name, place in self._each("the address of", ask, names, IN_THE_WAY).items():
            self.told[name]["place"] = place

    def reach(self) -> None:
        """Each host tries each other, unless they are known to look for each other at loopback addresses."""
        if any(meeting({name: self.told[name] for name in self._well})):
            return
        places = {name: self.told[name]["place"] for name in self._well if "place" in self.told[name]}
        doors = {name: [place["address"], place["port"]] for name, place in places.items() if "port" in place}
        patience_s = min(REACH_S, OVER_S - BACK_S - self.took_s)
        if patience_s < MIN_S:
            self.hurried.append((IN_THE_WAY, "the ways between them"))
            return

        def ask(name: str) -> Any:
            peers = {peer: door for peer, door in doors.items() if self._alone or peer != name}
            return self._ask(name, "reach", OVER_S, peers=peers, patience_s=patience_s)

        for one, reached in self._each("the ways from", ask, list(doors), IN_THE_WAY).items():
            self.pairs += [{"from": one, "to": other, "why": why} for other, why in reached.items()]

    def cross(self) -> None:
        """Those that reach each other: no host in two crossings at a time, each direction by itself."""
        good = {(pair["from"], pair["to"]): pair for pair in self.pairs if not pair["why"]}
        names = [name for name in self._well if any(name in pair for pair in good)]
        steps = [[(name, name) for name in names]] if self._alone else rounds(names)
        left_s = min(CROSSING_S, OVER_S - self.took_s)
        seconds = min(FLOOD_S[1], max(FLOOD_S[0], left_s / (2 * max(1, len(steps)))))

        for step in steps:
            for direction in (step, [(other, one) for one, other in step if one != other]):
                peers = {one: other for one, other in direction if (one, other) in good and (other, one) in good}

                def ask(name: str, peers: Mapping[str, str] = peers) -> Any:
                    to = {key: self.told[peers[name]]["place"][key] for key in ("address", "port")}
                    return self._ask(name, "measure", OVER_S, **to, seconds=seconds)

                here = [one for one, other in peers.items() if {one, other} <= set(self._well)]
                if OVER_S - self.took_s < MIN_S:
                    self.hurried += [(SLOW, f"the speed of {one} -> {peers[one]}") for one in here]
                    continue
                for one, found in self._each("the speeds from", ask, here).items():
                    good[one, peers[one]].update(found)

    def software(self, until_s: float) -> None:
        """Of those that have not said it yet."""
        names = [name for name in self._well if "late" in self.told[name].get("software", {"late": 0})]
        patience_s = max(0.0, until_s - self.took_s)

        def ask(name: str) -> Any:
            return self._ask(name, "software", OVER_S, patience_s=patience_s)

        for name, answer in self._each("the software of", ask, names).items():
            self.told[name]["software"] = answer

    def close(self) -> None:
        with self._lock:
            self._over, visits, end = True, list(self._visits.values()), time.monotonic() + CLOSE_S
        for visit in visits:
            visit.hang_up()
        for visit in visits:
            visit.close(end - time.monotonic())
        self._crowd.shutdown()
        placed = {name for name, told in self.told.items() if "place" in told}
        self.pairs = [pair for pair in self.pairs if {pair["from"], pair["to"]} <= placed]


def _clock(visit: RemoteSession, end: float) -> dict[str, float]:
    """Its clock minus ours, as of the middle of the quickest of a few questions; and how far that may be wrong."""
    best_s, skew_s = float("inf"), 0.0
    for _ in range(CLOCKS):
        start, begin = time.time(), time.perf_counter()
        theirs = visit.ask("clock", end - time.monotonic())
        took_s = time.perf_counter() - begin
        if took_s < best_s:
            best_s, skew_s = took_s, theirs - start - took_s / 2
    return {"skew_s": skew_s, "skew_error_s": best_s / 2}


def rounds(names: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Every pair once, in rounds in which no name has two: the circle method of a round-robin tournament."""
    circle: list[T | None] = [*names, *([None] if len(names) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found
