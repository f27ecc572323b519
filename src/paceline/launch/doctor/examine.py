"""Examines all hosts in parallel: metadata, reachability, speed between pairs; then `findings` names the problems.

seconds   0 ................. 5.5 ................................................ 8.5
          collect: metadata,      listen, reach (2 s), software, measure pair by pair
          clock                   .............................. late software, late hosts

Each phase ends when all hosts have answered, or at its deadline. Steps for which no time is left are reported.
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
from paceline.launch.doctor.findings import IN_THE_WAY, SLOW, Finding, diagnose, loopback_traps
from paceline.launch.doctor.remote_session import RemoteSession
from paceline.launch.hosts import Host, Way

COLLECT_S, ALONE_S, OVER_S = 5.5, 7.0, 8.5  # deadlines, from the beginning; see `collect`
QUIET_S = 6.5  # likewise: until then no speed is measured while torch is imported
REACH_S = 2.0
REPLY_S = 0.3  # for a host's answer to arrive after the time that the host was given
MIN_S = 0.6  # the shortest time in which a phase makes sense
MEASURE_S = 3.0
FLOOD_S = 0.1, 0.5  # minimum and maximum
CLOSE_S = 0.5
CLOCKS = 5

T = TypeVar("T")


@dataclass(frozen=True)
class Examination:
    """``hosts``: the report of each, or its ``fault``. ``pairs``: the measurements ``from`` one host ``to`` another.

    ``took_s``: from the beginning until all sessions were closed.
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
    """Examines these hosts; None: this machine alone. ``show`` is called with a line for each phase.

    address     rendezvous address, as every host resolves it; default: the address at which ssh reached the first host
    port        port that must be free on the first host; 0: any
    """
    exam = _HostExam(hosts, way)
    own = host_facts.collect(way.folder, [])
    with ChildProcesses():  # SIGTERM raises, and so closes the examination, as Ctrl-C does
        try:
            show(f"connecting to {', '.join(exam.reports)}")
            exam.collect()
            exam.listen(address, port)
            show("testing the connections between them")
            exam.reach()
            show("importing torch on each")
            exam.software(QUIET_S)
            show("measuring the connections between them")
            exam.measure()
            exam.software(OVER_S - REPLY_S)
            exam.wait_late()
        finally:
            exam.close()
    found = diagnose(own, exam.reports, exam.pairs, way)
    for weight, what in exam.skipped:
        text = f"no time was left for {what}; ask fewer hosts at once, or without those that do not answer"
        found.append(Finding(weight, "all", text))
    found.sort(key=lambda finding: finding.weight)
    return Examination(exam.reports, exam.pairs, found, exam.took_s)


class _HostExam:
    """The hosts and their reports so far. A host that fails to answer has a ``fault``, and gets no further queries."""

    def __init__(self, hosts: Sequence[Host] | None, way: Way):
        self._begin = time.monotonic()
        self._alone, self._way = hosts is None, way
        self._hosts = [Host(socket.gethostname(), "")] if hosts is None else list(hosts)
        self._sessions: dict[str, RemoteSession] = {}
        self._pool = ThreadPoolExecutor(len(self._hosts))
        self.reports: dict[str, dict[str, Any]] = {host.name: {} for host in self._hosts}
        self.pairs: list[dict[str, Any]] = []
        self.skipped: list[tuple[int, str]] = []  # weight and name of each step for which no time was left
        self._collecting: list[Future[None]] = []
        self._answered: list[str] = []
        self._lock, self._over = threading.Lock(), False

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._begin

    def _query(self, name: str, order: str, by_s: float, **options: Any) -> Any:
        """A host's answer to an order; ``by_s``: deadline, from the beginning. Raises ConnectionError, TimeoutError."""
        return self._sessions[name].query(order, by_s - self.took_s, **options)

    @property
    def _healthy(self) -> list[str]:
        return [name for name in self._answered if "fault" not in self.reports[name]]

    def _each(self, doing: str, what: Callable[[str], T], names: Sequence[str], weight: int = SLOW) -> dict[str, T]:
        """Calls ``what`` for all hosts in parallel. A host that is merely late has no fault: it may be busy."""

        def one(name: str) -> list[T]:
            try:
                return [what(name)]
            except TimeoutError:
                self.skipped.append((weight, f"{doing} {name}"))
            except ConnectionError as error:
                self.reports[name] = {"fault": str(error)}
            return []

        return {name: answers[0] for name, answers in zip(names, self._pool.map(one, names), strict=True) if answers}

    def collect(self) -> None:
        """Collects reports until COLLECT_S, or until ALONE_S if fewer than two hosts have answered. The connections of
        later hosts are not tested."""

        def ask(host: Host) -> None:
            try:
                session = self._connect(host)
                facts = self._query(host.name, "tell", OVER_S, folder=self._way.folder)
                self.reports[host.name] = {**facts, **_clock(session, self._begin + OVER_S)}
            except (ConnectionError, TimeoutError) as error:
                self.reports[host.name] = {"fault": str(error)}

        self._collecting = [self._pool.submit(ask, host) for host in self._hosts]
        for until_s in (COLLECT_S, ALONE_S):
            if len(self._healthy) < 2:
                wait(self._collecting, until_s - self.took_s)
            self._answered = [name for name, report in self.reports.items() if report]

    def _connect(self, host: Host) -> RemoteSession:
        """Opens a session. Raises ConnectionError if `close`, which ends all sessions, was called meanwhile."""
        session = RemoteSession(host, self._way, self._alone)
        with self._lock:
            if not self._over:
                self._sessions[host.name] = session
                return session
        session.close(0.0)
        raise ConnectionError("the examination was ended")

    def wait_late(self) -> None:
        """Waits for the reports of late hosts."""
        wait(self._collecting)  # each query ends at OVER_S
        late = [name for name, report in self.reports.items() if "fault" not in report and name not in self._answered]
        self.skipped += [(IN_THE_WAY, f"the connections to and from {name}, which answered late") for name in late]

    def listen(self, address: str, port: int) -> None:
        """Each host determines its own address and listens there."""
        if not (names := self._healthy):
            return
        nccls = os.environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
        where = address or self.reports[names[0]]["address"] or "127.0.0.1"
        same = {
            "meeting": where,
            "interface": os.environ.get("GLOO_SOCKET_IFNAME") or (nccls and f"={nccls}"),
            "secret": secrets.token_hex(32),
        }

        def ask(name: str) -> dict[str, Any]:
            wanted = port if name == names[0] else 0
            found = self._query(name, "open", OVER_S, **same, first=name == names[0], port=wanted)
            return {**found, "asked": address, "asked_port": wanted}

        for name, place in self._each("the address of", ask, names, IN_THE_WAY).items():
            self.reports[name]["place"] = place

    def reach(self) -> None:
        """Each host connects to each other host, unless their names are known to resolve to loopback addresses."""
        if any(loopback_traps({name: self.reports[name] for name in self._healthy})):
            return
        places = {name: self.reports[name]["place"] for name in self._healthy if "place" in self.reports[name]}
        endpoints = {name: [place["address"], place["port"]] for name, place in places.items() if "port" in place}
        patience_s = min(REACH_S, OVER_S - REPLY_S - self.took_s)
        if patience_s < MIN_S:
            self.skipped.append((IN_THE_WAY, "the connections between them"))
            return

        def ask(name: str) -> Any:
            peers = {peer: endpoint for peer, endpoint in endpoints.items() if self._alone or peer != name}
            return self._query(name, "reach", OVER_S, peers=peers, patience_s=patience_s)

        for one, reached in self._each("the connections from", ask, list(endpoints), IN_THE_WAY).items():
            self.pairs += [{"from": one, "to": other, "why": why} for other, why in reached.items()]

    def measure(self) -> None:
        """Measures pairs that reach each other, each direction separately; no host is in two pairs at a time."""
        good = {(pair["from"], pair["to"]): pair for pair in self.pairs if not pair["why"]}
        names = [name for name in self._healthy if any(name in pair for pair in good)]
        steps = [[(name, name) for name in names]] if self._alone else rounds(names)
        left_s = min(MEASURE_S, OVER_S - self.took_s)
        seconds = min(FLOOD_S[1], max(FLOOD_S[0], left_s / (2 * max(1, len(steps)))))

        for step in steps:
            for direction in (step, [(other, one) for one, other in step if one != other]):
                peers = {one: other for one, other in direction if (one, other) in good and (other, one) in good}

                def ask(name: str, peers: Mapping[str, str] = peers) -> Any:
                    to = {key: self.reports[peers[name]]["place"][key] for key in ("address", "port")}
                    return self._query(name, "measure", OVER_S, **to, seconds=seconds)

                ready = [one for one, other in peers.items() if {one, other} <= set(self._healthy)]
                if OVER_S - self.took_s < MIN_S:
                    self.skipped += [(SLOW, f"the speed of {one} -> {peers[one]}") for one in ready]
                    continue
                for one, found in self._each("the speeds from", ask, ready).items():
                    good[one, peers[one]].update(found)

    def software(self, until_s: float) -> None:
        """Queries the software versions of hosts that have not reported them yet."""
        names = [name for name in self._healthy if "late" in self.reports[name].get("software", {"late": 0})]
        patience_s = max(0.0, until_s - self.took_s)

        def ask(name: str) -> Any:
            return self._query(name, "software", OVER_S, patience_s=patience_s)

        for name, answer in self._each("the software of", ask, names).items():
            self.reports[name]["software"] = answer

    def close(self) -> None:
        with self._lock:
            self._over, sessions, end = True, list(self._sessions.values()), time.monotonic() + CLOSE_S
        for session in sessions:
            session.close_pipes()
        for session in sessions:
            session.close(end - time.monotonic())
        self._pool.shutdown()
        placed = {name for name, report in self.reports.items() if "place" in report}
        self.pairs = [pair for pair in self.pairs if {pair["from"], pair["to"]} <= placed]


def _clock(session: RemoteSession, end: float) -> dict[str, float]:
    """The host's clock minus ours, and the maximum error, from the query with the shortest round trip of CLOCKS."""
    best_s, skew_s = float("inf"), 0.0
    for _ in range(CLOCKS):
        start, begin = time.time(), time.perf_counter()
        their_clock_s = session.query("clock", end - time.monotonic())
        took_s = time.perf_counter() - begin
        if took_s < best_s:
            best_s, skew_s = took_s, their_clock_s - start - took_s / 2
    return {"skew_s": skew_s, "skew_error_s": best_s / 2}


def rounds(names: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Every pair once, in rounds of disjoint pairs: the circle method of a round-robin tournament."""
    circle: list[T | None] = [*names, *([None] if len(names) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found
