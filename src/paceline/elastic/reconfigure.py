"""Membership after a failure: the members of a generation rendezvous at the lowest of them, which decides (`quorum`).

Each keeps a meeting point of its own from the beginning, and knows those of all others.

    each        goes to the lowest rank that answers, and waits there; the one below which nobody answers waits itself
    it waits    until every other has come, or is gone (its machine has hung up for it), or silent (nothing answers
                there, or is refused), or says that all continued without this one
    decision    `quorum.decide`: those who came form the next generation; or they are cut off, and keep looking for the
                others (PACELINE_WAIT seconds); or this process ends, or the run resumes from a checkpoint

A process that was killed is gone for certain, so one node of two continues; where the cable between two was pulled,
each is silent to the other, and the lower rank continues, while the other one waits for it.

*Laws*: two parts of a run never both continue; all who continue know the same members and the same generation.
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
from paceline.elastic.connection_watch import HANG_UP_S, ConnectionFailureDetector
from paceline.elastic.quorum import ALIVE, DEAD, UNREACHABLE, Found, QuorumDecision, QuorumVerdict, Roll, decide
from paceline.environment import wait_s
from paceline.errors import LinkError
from paceline.link.net.store_client import StoreClient, connect
from paceline.link.net.store_server import RendezvousStore
from paceline.link.net.ticket import publish
from paceline.transport import JoinDesk, Joiner

GUEST, ANSWER, MEMBERS = "guest/", "answer/", "members"  # what a late node asks, is told, and wants to know
GENERATION = "generation"  # of the members that are told
ASKS = {"turn", "host", "place"}  # what every question holds
CONNECT_S = 1.2
JOIN_S = 20.0  # for those who were met a moment ago
SUSPECT_AFTER_S = 1.0  # without an answer, before a member counts as silent: two attempts to connect
TURN_S = 5.0  # at one member's meeting point, before the lower ones are tried again
LOOK_S = 2.0  # after which those who have been met, and do not go on, are looked for
ASK_S = 0.5  # after which those who have not come are asked, again and again, whether they ever will
NOTICE_S = 10.0  # of a meeting, before people are told for whom it waits
ALIVE_TIMEOUT_S = 300.0  # for those who are alive and may still be computing their step
POLL_S, LONG_POLL_S = 0.02, 0.1
REFUSED = "refused"  # what a look shows of a process that has ended, or that a firewall refuses for
NEW = "new"  # in the name of who was none of the nodes before


@dataclass(frozen=True)
class MemberAddress:
    """Where a member can be met again. ``name`` is its own for as long as it lives."""

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
        """Whether its process answers, as far as can be told from here. A kernel answers for a stopped one as well, and
        does not greet; who is refused may have ended, or a firewall refuses for it."""
        try:
            with connect(self.address, self.port, CONNECT_S) as line:
                return ALIVE if line.recv(1) else REFUSED  # it hung up: its process is ending
        except (ConnectionRefusedError, ConnectionResetError):
            return REFUSED
        except OSError:
            return UNREACHABLE


class Reconfiguration(JoinDesk):
    """``places``: of all members, by rank; ``point``: this one's own. ``least``: of them that may go on."""

    def __init__(
        self,
        rank: int,
        places: Sequence[MemberAddress],
        generation: int,
        point: RendezvousStore,
        secret: bytes,
        least: int = 1,
        before: ConnectionFailureDetector | None = None,
    ):
        self.rank, self.places, self.generation = rank, list(places), generation
        self.point, self.secret, self.least = point, secret, least
        self.me = self.places[rank]
        self.came: list[tuple[MemberAddress, Joiner]] = []  # by the last meeting, besides those who were here
        self.notice: Callable[[str], None] = lambda text: None  # told once of a meeting that lasts
        self._mentions_s = math.inf
        self._admits: Sequence[Joiner] = ()
        self._roll: Roll[str] = Roll()  # what looks at the others have shown, since this generation was formed
        self._called: set[str] = set()  # who has come to the rendezvous here
        self.wait_s = wait_s()  # for which one that is cut off looks for the others
        self._cut_s = math.inf  # since when it is
        self.glance: Callable[[], None] = lambda: None  # while it is: raises where waiting is to end
        self.bulk_server: BulkServer | None = None  # open once somebody has asked
        written = [place.write() for place in self.places]
        point.post(MEMBERS, json.dumps(written))
        point.post(GENERATION, str(generation))
        publish(written, secret)
        self._connections = ConnectionFailureDetector(self._reach)
        self._connections.watch((place.name for place in self.places if place is not self.me), before)

    def __str__(self) -> str:
        return f"rank {self.rank} of {len(self.places)} on {self.me.host}"

    def among(self, ranks: Sequence[int], generation: int) -> Reconfiguration:
        """The same member, among those of ``ranks`` and those who came."""
        places = [*(self.places[rank] for rank in ranks), *(place for place, _ in self.came)]
        rank = ranks.index(self.rank)
        heir = Reconfiguration(rank, places, generation, self.point, self.secret, self.least, self._connections)
        heir.bulk_server, heir.notice, heir.glance = self.bulk_server, self.notice, self.glance
        return heir

    def reconfigure(self, admits: Sequence[Joiner] = (), still_s: float = 0.0) -> tuple[StoreClient, int, list[int]]:
        """(the meeting of those who continue, their generation, their ranks here). Raises LinkError where this one, or
        nobody, may. ``admits``: whom this one takes in where it decides; `came` says who it was. ``still_s``: for how
        long it stood still just now, or heard nothing, while the others may have continued, and ended."""
        self._admits, self.came = admits, []
        everyone = frozenset(place.name for place in self.places if place is not self.me)
        self._roll = Roll(everyone if still_s else self._roll.suspects & everyone)
        token, self._cut_s = secrets.token_hex(8), math.inf
        begin_s = time.monotonic()
        self._mentions_s = begin_s + NOTICE_S
        while time.monotonic() < begin_s + ALIVE_TIMEOUT_S + self.wait_s:
            for place in self.places:
                decided = self._decide(begin_s + ALIVE_TIMEOUT_S) if place is self.me else self._ask(place, token)
                if decided:
                    self.generation = decided["generation"]
                    if decided["refused"]:
                        resumes = decided["verdict"] == QuorumVerdict.RESTORE.value
                        raise LinkError(f"{self}: {decided['refused']}", resumes=resumes)
                    with contextlib.suppress(LinkError):  # who decided has died since: all meet again
                        return self._join(place, decided)
                if decided or place is self.me:
                    break
            time.sleep(LONG_POLL_S)
        raise LinkError(f"{self} met none of the others again within {ALIVE_TIMEOUT_S:.0f} s; look at what those say")

    def _join(self, host: MemberAddress, decided: dict[str, Any]) -> tuple[StoreClient, int, list[int]]:
        ranks = [rank for rank, place in enumerate(self.places) if place.name in decided["names"]]
        self._roll = self._roll.after({}, decided["names"], time.monotonic())
        self.came = [(MemberAddress.read(place.encode()), Joiner(**joiner)) for place, joiner in decided["guests"]]
        meeting = self._line(host, ranks.index(self.rank), len(ranks) + len(self.came))
        meeting.patience_s = JOIN_S
        next_s = time.monotonic() + LOOK_S

        def alert() -> None:
            nonlocal next_s
            for place, joiner in self.came:  # the others are alive, and need not wait for long
                if place.probe() != ALIVE:
                    raise LinkError(f"the joining node {joiner.host} has failed")
            if time.monotonic() > next_s:
                self._look_after([self.places[rank] for rank in ranks if rank != self.rank])
                next_s = time.monotonic() + LOOK_S

        meeting.alert = alert
        return meeting, self.generation, ranks

    def _look_after(self, others: Sequence[MemberAddress]) -> None:
        """While waiting for those who were met a moment ago. Raises LinkError where one is gone by now."""
        self._look(others)
        now = time.monotonic()
        for place in others:
            if self._roll.found(place.name, (), now, SUSPECT_AFTER_S) is not Found.EXPECTED:
                raise LinkError(f"{place.host} answered and then failed")

    def _reach(self, name: str) -> StoreClient:
        return self._line(next(place for place in self.places if place.name == name), self.rank, len(self.places))

    def _line(self, host: MemberAddress, rank: int, size: int) -> StoreClient:
        point = self.point if host is self.me else None
        return StoreClient(host.address, host.port, self.secret, rank, size, TURN_S, point)

    def _ask(self, place: MemberAddress, token: str) -> dict[str, Any] | None:
        """What has been decided there; None where nobody answers, or decides yet."""
        if self._look([place])[place.name] != ALIVE:
            return None
        with contextlib.suppress(LinkError):
            meeting = self._line(place, self.rank, len(self.places))
            try:
                meeting.set(f"call/{self.me.name}", f"{token} {self.generation}")
                end = time.monotonic() + TURN_S
                ask_s = time.monotonic() + ASK_S
                while time.monotonic() < end:
                    self._mention([place])
                    if time.monotonic() > ask_s:
                        if self._went_on(place):  # whoever decided cannot be reached from here
                            return self._ends(decide([Found.AHEAD]))
                        ask_s = time.monotonic() + ASK_S
                    for key in (f"decided/{token}", f"without/{self.me.name}"):
                        if meeting.check([key]):
                            found: dict[str, Any] = json.loads(meeting.get(key))
                            return found
                    time.sleep(POLL_S)
                meeting.delete_key(f"call/{self.me.name}")
            finally:
                meeting.close()
        return None

    def _decide(self, late_s: float) -> dict[str, Any] | None:
        """As the lowest that answers; None where a lower one answers after all. ``late_s``: until when those who answer
        and do not come are waited for."""
        others = [place for place in self.places if place is not self.me]
        ask_s, ahead = time.monotonic() + ASK_S, set[str]()
        meeting = self._line(self.me, self.rank, len(self.places))
        try:
            while True:
                seen = self._look(others)
                now = time.monotonic()
                if any(seen[place.name] == ALIVE for place in self.places[: self.rank]):
                    return None
                calls = {p.name: meeting.get(f"call/{p.name}") for p in others if meeting.check([f"call/{p.name}"])}
                self._called = set(calls)
                self._roll = self._roll.after({}, calls, now)
                found = [self._found(place, ahead, now, now > late_s) for place in self.places]
                decision = decide(found, self.least, [self._name(place) for place in self.places])
                if decision.quorum or decision.verdict in (QuorumVerdict.END, QuorumVerdict.RESTORE):
                    return self._tell(meeting, found, decision, calls)
                missing = [p for p, how in zip(self.places, found, strict=True) if how is Found.EXPECTED]
                if not missing and self._has_waited(decision, now):
                    why = f"{decision.why}; it waited {self.wait_s:.0f} s for them (--wait), in vain"
                    return self._tell(meeting, found, QuorumDecision(QuorumVerdict.RESTORE, why=why), calls)
                missing = [place for place in missing if seen[place.name] == ALIVE]
                self._mention(missing)
                if now > ask_s:
                    ahead = {place.name for place in missing if self._went_on(place)}
                    ask_s = time.monotonic() + ASK_S
                time.sleep(LONG_POLL_S)
        finally:
            meeting.close()

    def _found(self, place: MemberAddress, ahead: set[str], now: float, late: bool) -> Found:
        if place is self.me:
            return Found.CAME
        if place.name in ahead:
            return Found.AHEAD
        how = self._roll.found(place.name, self._called, now, SUSPECT_AFTER_S)
        return Found.SILENT if late and how is Found.EXPECTED else how

    def _name(self, place: MemberAddress) -> str:
        return f"rank {self.places.index(place)} on {place.host}"

    def _has_waited(self, decision: QuorumDecision, now: float) -> bool:
        """Cut off from the others, for so long as one waits for them. Raises what `glance` raises."""
        if self._cut_s == math.inf:
            self._cut_s = now
            self.notice(f"{self} is {decision.why}; it waits up to {self.wait_s:.0f} s for them (--wait)")
        self.glance()
        return now - self._cut_s > self.wait_s

    def _ends(self, decision: QuorumDecision) -> dict[str, Any]:
        return {"generation": self.generation, "refused": decision.why, "verdict": decision.verdict.value}

    def _mention(self, others: Sequence[MemberAddress]) -> None:
        if others and time.monotonic() > self._mentions_s:
            self._mentions_s = math.inf
            who = ", ".join(map(self._name, others))
            self.notice(
                f"{self} has been meeting those who are left for {NOTICE_S:.0f} s, and waits for {who}: alive, "
                f"and not there yet; it may be computing its step"
            )

    def _went_on(self, place: MemberAddress) -> bool:
        """Whether it is in a later generation, and this one is not."""
        with contextlib.suppress(LinkError):
            meeting = self._line(place, self.rank, len(self.places))
            try:
                if int(meeting.get(GENERATION)) > self.generation:
                    told = json.loads(meeting.get(MEMBERS))  # at least as new
                    return self.me.name not in [MemberAddress.read(text.encode()).name for text in told]
            finally:
                meeting.close()
        return False

    def _look(self, places: Sequence[MemberAddress]) -> dict[str, str]:
        if not places:
            return {}
        with ThreadPoolExecutor(min(32, len(places))) as crowd:
            seen = dict(zip((p.name for p in places), crowd.map(self._see, places), strict=True))
        self._roll = self._roll.after(seen, (), time.monotonic())
        return seen

    def _see(self, place: MemberAddress) -> str:
        how = place.probe()
        if how == ALIVE:
            return ALIVE
        return DEAD if self._connections.ended(place.name, HANG_UP_S if how == REFUSED else 0.0) else UNREACHABLE

    def _tell(
        self, meeting: StoreClient, found: Sequence[Found], decision: QuorumDecision, calls: dict[str, bytes]
    ) -> dict[str, Any]:
        going = [place for place, how in zip(self.places, found, strict=True) if how is Found.CAME]
        said = [calls[place.name].decode().split() for place in going if place is not self.me]
        decided = {
            "generation": 1 + max(self.generation, *(int(generation) for _, generation in said), 0),
            "names": [place.name for place in going],
            "refused": "" if decision.quorum else decision.why,
            "verdict": decision.verdict.value,
        }
        asking = self.waiting() if self._admits and not decided["refused"] else {}
        # who has asked again since is not the one that was to be taken in
        joiners = [joiner for joiner in self._admits if asking.get(joiner.name, {}).get("turn") == joiner.turn]
        decided["guests"] = [(asking[joiner.name]["place"], asdict(joiner)) for joiner in joiners]
        told = {"decided": decided, "members": [place.write() for place in going], "least": self.least}
        for joiner in joiners:
            self.answer(joiner.name, told)
        for token, _ in said:
            meeting.set(f"decided/{token}", json.dumps(decided))
        for place in self.places:
            meeting.delete_key(f"call/{place.name}")
            if place not in going:
                without = decide([Found.AHEAD]) if decision.quorum else decision
                meeting.set(f"without/{place.name}", json.dumps({**decided, **self._ends(without)}))
        return decided

    # who comes late

    def waiting(self) -> dict[str, dict[str, Any]]:
        if not self.point.num_leased and not (self.bulk_server and self.bulk_server.here):
            if self.bulk_server:  # which listens while a joining node asks
                self.bulk_server.close()
                self.bulk_server = None
            return {}  # as in nearly every step
        asked = {name: json.loads(words) for name, words in self.point.posted(GUEST).items()}
        asked = {name: said for name, said in asked.items() if said.keys() >= ASKS}
        for name in self.point.posted(ANSWER).keys() - asked.keys():
            self.point.remove(ANSWER + name)
        if self.bulk_server:
            for name in self.bulk_server.here.keys() - asked.keys():
                self.bulk_server.here.pop(name).close()
        for place in self.places:
            asked.pop(place.name, None)  # it was taken in, and has not hung up yet
        here = {_node(place.name): f"rank {rank} on {place.host}" for rank, place in enumerate(self.places)}
        for name, said in list(asked.items()):
            if (twin := here.get(_node(name))) and _node(name) != NEW:
                del asked[name]
                why = f"node {_node(name)} of this run trains already, as {twin}; end that one first"
                self._post(name, {"refused": why}, said)
            here.setdefault(_node(name), f"{said['host']}, which waits to be taken in")
        return asked

    def answer(self, name: str, said: dict[str, Any]) -> None:
        if asked := self.waiting().get(name):
            self._post(name, said, asked)

    def _post(self, name: str, said: dict[str, Any], asked: dict[str, Any]) -> None:
        self.bulk_server = self.bulk_server or BulkServer(self.me.address, self.secret)
        told = {**said, "turn": asked["turn"], "hatch": [self.bulk_server.address, self.bulk_server.port]}
        self.point.post(ANSWER + name, json.dumps(told))

    def line(self, name: str) -> BulkChannel:
        end = time.monotonic() + TURN_S
        while self.bulk_server is None or name not in self.bulk_server.here:
            if time.monotonic() > end:
                raise LinkError(f"{name} did not come to be given anything")
            time.sleep(POLL_S)
        return self.bulk_server.here[name]


def _node(name: str) -> str:
    """Which of the run's nodes has this name; each life of a node has another."""
    return name.partition("-")[0]
