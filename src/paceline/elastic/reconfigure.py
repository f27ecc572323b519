"""Membership after a failure: the members of a generation rendezvous at the lowest of them, which decides (`quorum`).

Each member runs a rendezvous store of its own from the beginning, and knows the addresses of all others.

    each        connects to the store of the lowest rank that answers; where no lower rank answers, it hosts
    the host    waits until every other member has called, or has ended (its kernel closed the connection with FIN), or
                is silent (no answer, or connections are refused), or reports that all continued without this host
    decision    `quorum.decide`: the members present form the next generation; or they are cut off, and keep probing
                the others (PACELINE_WAIT seconds); or this process ends, or the run resumes from a checkpoint

A process that was killed has certainly ended, so one node of two continues. If the cable between two nodes was pulled,
each is silent to the other: the lower rank continues, and the other one waits for it.

*Invariants*: two parts of a run never both continue; all that continue know the same members and the same generation.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from paceline.elastic.bulk_channel import BulkChannel, BulkServer
from paceline.elastic.connection_watch import HANG_UP_S, ConnectionWatch
from paceline.elastic.quorum import (
    ALIVE,
    DEAD,
    UNREACHABLE,
    MemberHistory,
    MemberStatus,
    QuorumDecision,
    QuorumVerdict,
    decide,
)
from paceline.environment import wait_s
from paceline.errors import LinkError
from paceline.link.net.store_client import StoreClient, connect
from paceline.link.net.store_server import RendezvousStore
from paceline.link.net.ticket import publish
from paceline.transport import JoinDesk, Joiner

REQUEST, RESPONSE, MEMBERS = "guest/", "answer/", "members"  # keys of a joining node's request, the response, the list
GENERATION = "generation"  # key of the generation of that list
REQUEST_KEYS = {"turn", "host", "place"}  # what every request holds
CONNECT_S = 1.2  # for a probe
JOIN_S = 20.0  # for members that called a moment ago
SUSPECT_AFTER_S = 1.0  # without an answer, before a member counts as silent: two probes
TRY_S = 5.0  # at one member's store, before lower ranks are tried again
PROBE_EVERY_S = 2.0  # of members that have called and have not connected yet
QUERY_EVERY_S = 0.5  # of members that have not called: whether they continued without this one
NOTICE_S = 10.0  # before a log line says for which members the rendezvous waits
ALIVE_TIMEOUT_S = 300.0  # for members that are alive and may still be computing their step
POLL_S, LONG_POLL_S = 0.02, 0.1
REFUSED = "refused"  # probe result: the process has ended, or a firewall refuses connections to it
NEW = "new"  # in the name of a node that did not belong to the run before


@dataclass(frozen=True)
class MemberAddress:
    """The address of a member's rendezvous store. ``name``: unique, for the lifetime of the process."""

    name: str
    host: str
    address: str
    port: int

    def write(self) -> str:
        return f"{self.name} {self.address} {self.port} {self.host}"

    @classmethod
    def read(cls, text: bytes) -> MemberAddress:
        name, address, port, host = text.decode().split(" ", 3)
        return cls(name, host, address, int(port))

    def probe(self) -> str:
        """Whether its process answers. The kernel accepts a connection also for a stopped process, which then sends no
        greeting. A refused connection may mean that the process has ended, or that a firewall refuses it."""
        try:
            with connect(self.address, self.port, CONNECT_S) as connection:
                return ALIVE if connection.recv(1) else REFUSED  # closed at once: its process is ending
        except (ConnectionRefusedError, ConnectionResetError):
            return REFUSED
        except OSError:
            return UNREACHABLE


class Reconfiguration(JoinDesk):
    """``members``: all, by rank; ``store``: this one's own. ``min_nodes``: the fewest that may train."""

    def __init__(
        self,
        rank: int,
        members: Sequence[MemberAddress],
        generation: int,
        store: RendezvousStore,
        secret: bytes,
        min_nodes: int = 1,
        previous: ConnectionWatch | None = None,
    ):
        self.rank, self.members, self.generation = rank, list(members), generation
        self.store, self.secret, self.min_nodes = store, secret, min_nodes
        self.me = self.members[rank]
        self.joined: list[tuple[MemberAddress, Joiner]] = []  # at the last rendezvous
        self.notice: Callable[[str], None] = lambda text: None  # called once for a rendezvous that lasts long
        self._notice_at_s = math.inf
        self._joiners: Sequence[Joiner] = ()
        self._history: MemberHistory[str] = MemberHistory()  # of the probes since this generation was formed
        self._called: set[str] = set()  # members that have called at this store
        self.wait_s = wait_s()  # how long a member that is cut off probes the others
        self._cut_off_s = math.inf  # since when it is cut off
        self.glance: Callable[[], None] = lambda: None  # called meanwhile: raises to end the wait
        self.bulk_server: BulkServer | None = None  # opened at the first request
        addresses = [member.write() for member in self.members]
        store.post(MEMBERS, json.dumps(addresses))
        store.post(GENERATION, str(generation))
        publish(addresses, secret)
        self._connections = ConnectionWatch(self._connect)
        self._connections.watch((member.name for member in self.members if member is not self.me), previous)

    def __str__(self) -> str:
        return f"rank {self.rank} of {len(self.members)} on {self.me.host}"

    def successor(self, ranks: Sequence[int], generation: int) -> Reconfiguration:
        """The same member in the next generation, which consists of ``ranks`` and the nodes that joined."""
        members = [*(self.members[rank] for rank in ranks), *(member for member, _ in self.joined)]
        rank = ranks.index(self.rank)
        new = Reconfiguration(rank, members, generation, self.store, self.secret, self.min_nodes, self._connections)
        new.bulk_server, new.notice, new.glance = self.bulk_server, self.notice, self.glance
        return new

    def reconfigure(self, joiners: Sequence[Joiner] = (), still_s: float = 0.0) -> tuple[StoreClient, int, list[int]]:
        """(the store of the members that continue, their generation, their ranks here). Raises LinkError where this
        one, or none, may continue. ``joiners``: admitted if this member decides; `joined` says which were. ``still_s``:
        for how long this process was suspended, or received nothing, while the others may have continued and ended."""
        self._joiners, self.joined = joiners, []
        others = frozenset(member.name for member in self.members if member is not self.me)
        self._history = MemberHistory(others if still_s else self._history.suspects & others)
        token, self._cut_off_s = secrets.token_hex(8), math.inf
        begin_s = time.monotonic()
        self._notice_at_s = begin_s + NOTICE_S
        while time.monotonic() < begin_s + ALIVE_TIMEOUT_S + self.wait_s:
            for host in self.members:
                decided = self._decide(begin_s + ALIVE_TIMEOUT_S) if host is self.me else self._call(host, token)
                if decided:
                    self.generation = decided["generation"]
                    if decided["refused"]:
                        resumes = decided["verdict"] == QuorumVerdict.RESTORE.value
                        raise LinkError(f"{self}: {decided['refused']}", resumes=resumes)
                    with contextlib.suppress(LinkError):  # the host has failed since: all rendezvous again
                        return self._join(host, decided)
                if decided or host is self.me:
                    break
            time.sleep(LONG_POLL_S)
        raise LinkError(f"{self} reached no other member again within {ALIVE_TIMEOUT_S:.0f} s; look at their output")

    def _join(self, host: MemberAddress, decided: dict[str, Any]) -> tuple[StoreClient, int, list[int]]:
        ranks = [rank for rank, member in enumerate(self.members) if member.name in decided["names"]]
        self._history = self._history.after({}, decided["names"], time.monotonic())
        self.joined = [(MemberAddress.read(text.encode()), Joiner(**joiner)) for text, joiner in decided["guests"]]
        store = self._open(host, ranks.index(self.rank), len(ranks) + len(self.joined))
        store.patience_s = JOIN_S
        next_s = time.monotonic() + PROBE_EVERY_S

        def alert() -> None:
            nonlocal next_s
            for member, joiner in self.joined:  # the others are alive, and need not wait for long
                if member.probe() != ALIVE:
                    raise LinkError(f"the joining node {joiner.host} has failed")
            if time.monotonic() > next_s:
                self._check_alive([self.members[rank] for rank in ranks if rank != self.rank])
                next_s = time.monotonic() + PROBE_EVERY_S

        store.alert = alert
        return store, self.generation, ranks

    def _check_alive(self, others: Sequence[MemberAddress]) -> None:
        """Raises LinkError where one of these, which called a moment ago, has failed since."""
        self._probe_all(others)
        now = time.monotonic()
        for member in others:
            if self._history.status(member.name, (), now, SUSPECT_AFTER_S) is not MemberStatus.EXPECTED:
                raise LinkError(f"{member.host} answered and then failed")

    def _connect(self, name: str) -> StoreClient:
        return self._open(next(each for each in self.members if each.name == name), self.rank, len(self.members))

    def _open(self, host: MemberAddress, rank: int, size: int) -> StoreClient:
        store = self.store if host is self.me else None
        return StoreClient(host.address, host.port, self.secret, rank, size, TRY_S, store)

    def _call(self, host: MemberAddress, token: str) -> dict[str, Any] | None:
        """The decision of that host; None where it does not answer, or has not decided yet."""
        if self._probe_all([host])[host.name] != ALIVE:
            return None
        with contextlib.suppress(LinkError):
            store = self._open(host, self.rank, len(self.members))
            try:
                store.set(f"call/{self.me.name}", f"{token} {self.generation}")
                end = time.monotonic() + TRY_S
                query_s = time.monotonic() + QUERY_EVERY_S
                while time.monotonic() < end:
                    self._log_wait([host])
                    if time.monotonic() > query_s:
                        if self._continued(host):  # the member that decided cannot be reached from here
                            return self._refusal(decide([MemberStatus.AHEAD]))
                        query_s = time.monotonic() + QUERY_EVERY_S
                    for key in (f"decided/{token}", f"without/{self.me.name}"):
                        if store.check([key]):
                            decided: dict[str, Any] = json.loads(store.get(key))
                            return decided
                    time.sleep(POLL_S)
                store.delete_key(f"call/{self.me.name}")
            finally:
                store.close()
        return None

    def _decide(self, late_s: float) -> dict[str, Any] | None:
        """As the lowest rank that answers; None where a lower one answers after all. ``late_s``: until when members
        that answer, and have not called, are waited for."""
        others = [member for member in self.members if member is not self.me]
        query_s, ahead = time.monotonic() + QUERY_EVERY_S, set[str]()
        store = self._open(self.me, self.rank, len(self.members))
        try:
            while True:
                seen = self._probe_all(others)
                now = time.monotonic()
                if any(seen[member.name] == ALIVE for member in self.members[: self.rank]):
                    return None
                calls = {m.name: store.get(f"call/{m.name}") for m in others if store.check([f"call/{m.name}"])}
                self._called = set(calls)
                self._history = self._history.after({}, calls, now)
                statuses = [self._status(member, ahead, now, now > late_s) for member in self.members]
                decision = decide(statuses, self.min_nodes, [self._name(member) for member in self.members])
                if decision.quorum or decision.verdict in (QuorumVerdict.END, QuorumVerdict.RESTORE):
                    return self._publish(store, statuses, decision, calls)
                missing = [m for m, how in zip(self.members, statuses, strict=True) if how is MemberStatus.EXPECTED]
                if not missing and self._wait_expired(decision, now):
                    why = f"{decision.why}; it waited {self.wait_s:.0f} s for them (--wait), in vain"
                    return self._publish(store, statuses, QuorumDecision(QuorumVerdict.RESTORE, why=why), calls)
                missing = [member for member in missing if seen[member.name] == ALIVE]
                self._log_wait(missing)
                if now > query_s:
                    ahead = {member.name for member in missing if self._continued(member)}
                    query_s = time.monotonic() + QUERY_EVERY_S
                time.sleep(LONG_POLL_S)
        finally:
            store.close()

    def _status(self, member: MemberAddress, ahead: set[str], now: float, late: bool) -> MemberStatus:
        if member is self.me:
            return MemberStatus.PRESENT
        if member.name in ahead:
            return MemberStatus.AHEAD
        status = self._history.status(member.name, self._called, now, SUSPECT_AFTER_S)
        return MemberStatus.SILENT if late and status is MemberStatus.EXPECTED else status

    def _name(self, member: MemberAddress) -> str:
        return f"rank {self.members.index(member)} on {member.host}"

    def _wait_expired(self, decision: QuorumDecision, now: float) -> bool:
        """Whether this member has been cut off from the others for `wait_s`. Raises what `glance` raises."""
        if self._cut_off_s == math.inf:
            self._cut_off_s = now
            self.notice(f"{self} is {decision.why}; it waits up to {self.wait_s:.0f} s for them (--wait)")
        self.glance()
        return now - self._cut_off_s > self.wait_s

    def _refusal(self, decision: QuorumDecision) -> dict[str, Any]:
        return {"generation": self.generation, "refused": decision.why, "verdict": decision.verdict.value}

    def _log_wait(self, others: Sequence[MemberAddress]) -> None:
        if others and time.monotonic() > self._notice_at_s:
            self._notice_at_s = math.inf
            names = ", ".join(map(self._name, others))
            self.notice(
                f"{self}: the rendezvous of the survivors has lasted {NOTICE_S:.0f} s, and waits for {names}: alive, "
                f"and has not arrived yet; it may be computing its step"
            )

    def _continued(self, member: MemberAddress) -> bool:
        """Whether that member is in a later generation, to which this one does not belong."""
        with contextlib.suppress(LinkError):
            store = self._open(member, self.rank, len(self.members))
            try:
                if int(store.get(GENERATION)) > self.generation:
                    addresses = json.loads(store.get(MEMBERS))  # at least as new
                    return self.me.name not in [MemberAddress.read(text.encode()).name for text in addresses]
            finally:
                store.close()
        return False

    def _probe_all(self, members: Sequence[MemberAddress]) -> dict[str, str]:
        if not members:
            return {}
        with ThreadPoolExecutor(min(32, len(members))) as pool:
            seen = dict(zip((m.name for m in members), pool.map(self._probe, members), strict=True))
        self._history = self._history.after(seen, (), time.monotonic())
        return seen

    def _probe(self, member: MemberAddress) -> str:
        how = member.probe()
        if how == ALIVE:
            return ALIVE
        return DEAD if self._connections.ended(member.name, HANG_UP_S if how == REFUSED else 0.0) else UNREACHABLE

    def _publish(
        self, store: StoreClient, statuses: Sequence[MemberStatus], decision: QuorumDecision, calls: dict[str, bytes]
    ) -> dict[str, Any]:
        present = [m for m, status in zip(self.members, statuses, strict=True) if status is MemberStatus.PRESENT]
        called = [calls[member.name].decode().split() for member in present if member is not self.me]
        decided = {
            "generation": 1 + max(self.generation, *(int(generation) for _, generation in called), 0),
            "names": [member.name for member in present],
            "refused": "" if decision.quorum else decision.why,
            "verdict": decision.verdict.value,
        }
        requests = self.waiting() if self._joiners and not decided["refused"] else {}
        # a node that has sent another request since is not the one that was to be admitted
        joiners = [joiner for joiner in self._joiners if requests.get(joiner.name, {}).get("turn") == joiner.turn]
        decided["guests"] = [(requests[joiner.name]["place"], asdict(joiner)) for joiner in joiners]
        response = {"decided": decided, "members": [member.write() for member in present], "least": self.min_nodes}
        for joiner in joiners:
            self.answer(joiner.name, response)
        for token, _ in called:
            store.set(f"decided/{token}", json.dumps(decided))
        for member in self.members:
            store.delete_key(f"call/{member.name}")
            if member not in present:
                without = decide([MemberStatus.AHEAD]) if decision.quorum else decision
                store.set(f"without/{member.name}", json.dumps({**decided, **self._refusal(without)}))
        return decided

    # joining nodes

    def waiting(self) -> dict[str, dict[str, Any]]:
        if not self.store.num_leased and not (self.bulk_server and self.bulk_server.channels):
            if self.bulk_server:  # it listens only while a joining node requests something
                self.bulk_server.close()
                self.bulk_server = None
            return {}  # as in nearly every step
        requests = {name: json.loads(text) for name, text in self.store.posted(REQUEST).items()}
        requests = {name: request for name, request in requests.items() if request.keys() >= REQUEST_KEYS}
        for name in self.store.posted(RESPONSE).keys() - requests.keys():
            self.store.remove(RESPONSE + name)
        if self.bulk_server:
            for name in self.bulk_server.channels.keys() - requests.keys():
                self.bulk_server.channels.pop(name).close()
        for member in self.members:
            requests.pop(member.name, None)  # it was admitted, and has not closed its connection yet
        nodes = {_node(member.name): f"rank {rank} on {member.host}" for rank, member in enumerate(self.members)}
        for name, request in list(requests.items()):
            if (twin := nodes.get(_node(name))) and _node(name) != NEW:
                del requests[name]
                why = f"node {_node(name)} of this run trains already, as {twin}; end that one first"
                self._respond(name, {"refused": why}, request)
            nodes.setdefault(_node(name), f"{request['host']}, which waits to be admitted")
        return requests

    def answer(self, name: str, response: dict[str, Any]) -> None:
        if request := self.waiting().get(name):
            self._respond(name, response, request)

    def _respond(self, name: str, response: dict[str, Any], request: dict[str, Any]) -> None:
        self.bulk_server = self.bulk_server or BulkServer(self.me.address, self.secret)
        message = {**response, "turn": request["turn"], "hatch": [self.bulk_server.address, self.bulk_server.port]}
        self.store.post(RESPONSE + name, json.dumps(message))

    def channel(self, name: str) -> BulkChannel:
        end = time.monotonic() + TRY_S
        while self.bulk_server is None or name not in self.bulk_server.channels:
            if time.monotonic() > end:
                raise LinkError(f"joining node {name} opened no bulk channel within {TRY_S:g} s")
            time.sleep(POLL_S)
        return self.bulk_server.channels[name]


def _node(name: str) -> str:
    """The run's node with this name; each start of a node has another name."""
    return name.partition("-")[0]
