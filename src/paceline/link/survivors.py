"""Who is left: after a loss the members meet at the lowest of them, who decides who goes on.

Each keeps a meeting point of its own from the beginning, and knows those of all others.

    each        goes to the lowest rank that answers, and waits there; the one below whom nobody answers waits itself
    who waits   until every other has come, or is gone (its machine has hung up for it), or silent (nothing answers
                there, or is refused), or says that all went on without this one
    goes on     who has come, where they are more than the silent ones; of two equal parts, that with the lowest rank

A process that was killed is gone for certain, so one node of two goes on; where the cable between two was pulled, each
is silent to the other, and the lower rank goes on. Who went on without this one may have ended as well, and looks like
killed: so whoever was silent once stays it, as all do who are gone for one that has stood still or heard nothing.

*Laws*: two parts of a run never both go on; all who go on know the same members and the same generation.
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

from paceline.contract import Guest, LinkError, Porter
from paceline.link.bulk import Bulk, Hatch
from paceline.link.meeting import Meeting, knock
from paceline.link.meeting_point import MeetingPoint
from paceline.link.ticket import publish
from paceline.link.witness import HANG_UP_S, Witness

GUEST, ANSWER, MEMBERS = "guest/", "answer/", "members"  # what a late node asks, is told, and wants to know
GENERATION = "generation"  # of the members that are told
ASKS = {"turn", "host", "place"}  # what every question holds
KNOCK_S = 1.2
JOIN_S = 20.0  # for those who were met a moment ago
DOUBT_S = 1.0  # without an answer, before a member counts as silent: two knocks
TURN_S = 5.0  # at one member's meeting point, before the lower ones are tried again
LOOK_S = 2.0  # after which those who have been met, and do not go on, are looked for
ASK_S = 0.5  # after which those who have not come are asked, again and again, whether they ever will
NOTICE_S = 10.0  # of a meeting, before people are told for whom it waits
LATE_S = 300.0  # for those who are alive and may still be computing their step
GLANCE_S, PAUSE_S = 0.02, 0.1
HERE, GONE, REFUSED, SILENT = "here", "gone", "refused", "silent"
NEW = "new"  # in the name of who was none of the nodes before
WITHOUT = "the others could not reach this node for a while, and went on without it; start it again"


@dataclass(frozen=True)
class Place:
    """Where a member can be met again. ``name`` is its own for as long as it lives."""

    name: str
    host: str
    address: str
    port: int

    def write(self) -> str:
        return f"{self.name} {self.address} {self.port} {self.host}"

    @classmethod
    def read(cls, text: bytes) -> Place:
        name, address, port, host = text.decode().split(" ", 3)
        return cls(name, host, address, int(port))

    def look(self) -> str:
        """Whether its process answers, as far as can be told from here. A kernel answers for a stopped one as well, and
        does not greet; who is refused may have ended, or a firewall refuses for it."""
        try:
            with knock(self.address, self.port, KNOCK_S) as line:
                return HERE if line.recv(1) else SILENT
        except (ConnectionRefusedError, ConnectionResetError):
            return REFUSED
        except OSError:
            return SILENT


class Survivors(Porter):
    """``places``: of all members, by rank; ``point``: this one's own. ``least``: of them that may go on."""

    def __init__(
        self,
        rank: int,
        places: Sequence[Place],
        generation: int,
        point: MeetingPoint,
        secret: bytes,
        least: int = 1,
        before: Witness | None = None,
    ):
        self.rank, self.places, self.generation = rank, list(places), generation
        self.point, self.secret, self.least = point, secret, least
        self.me = self.places[rank]
        self.came: list[tuple[Place, Guest]] = []  # by the last meeting, besides those who were here
        self.notice: Callable[[str], None] = lambda text: None  # told once of a meeting that lasts
        self._mentions_s = math.inf
        self._admits: Sequence[Guest] = ()
        self._still_s = 0.0
        self._silent: dict[str, float] = {}  # in this meeting, since when
        self._doubted: set[str] = set()  # in this meeting: have ended, perhaps after they went on without this one
        self.hatch: Hatch | None = None  # open once somebody has asked
        written = [place.write() for place in self.places]
        point.post(MEMBERS, json.dumps(written))
        point.post(GENERATION, str(generation))
        publish(written, secret)
        self._witness = Witness(self._reach)
        self._witness.watch((place.name for place in self.places if place is not self.me), before)

    def __str__(self) -> str:
        return f"rank {self.rank} of {len(self.places)} on {self.me.host}"

    def among(self, ranks: Sequence[int], generation: int) -> Survivors:
        """The same member, among those of ``ranks`` and those who came."""
        places = [*(self.places[rank] for rank in ranks), *(place for place, _ in self.came)]
        rank = ranks.index(self.rank)
        heir = Survivors(rank, places, generation, self.point, self.secret, self.least, self._witness)
        heir.hatch, heir.notice = self.hatch, self.notice
        return heir

    def meet(self, admits: Sequence[Guest] = (), still_s: float = 0.0) -> tuple[Meeting, int, list[int]]:
        """(the meeting of those who go on, their generation, their ranks here). Raises LinkError where this one, or
        nobody, may go on. ``admits``: whom this one takes in where it decides; `came` says who it was. ``still_s``:
        for how long it stood still just now, or heard nothing, while the others may have gone on, and ended."""
        self._admits, self.came, self._still_s, self._silent, self._doubted = admits, [], still_s, {}, set()
        token, end = secrets.token_hex(8), time.monotonic() + LATE_S
        self._mentions_s = time.monotonic() + NOTICE_S
        while time.monotonic() < end:
            for place in self.places:
                decided = self._decide(end) if place is self.me else self._ask(place, token)
                if decided:
                    self.generation = decided["generation"]
                    if decided["refused"]:
                        raise LinkError(f"{self}: {decided['refused']}")
                    with contextlib.suppress(LinkError):  # who decided has died since: all meet again
                        return self._join(place, decided)
                if decided or place is self.me:
                    break
            time.sleep(PAUSE_S)
        raise LinkError(f"{self} met none of the others again within {LATE_S:.0f} s; look at what those say")

    def _join(self, host: Place, decided: dict[str, Any]) -> tuple[Meeting, int, list[int]]:
        ranks = [rank for rank, place in enumerate(self.places) if place.name in decided["names"]]
        self.came = [(Place.read(place.encode()), Guest(**guest)) for place, guest in decided["guests"]]
        meeting = self._line(host, ranks.index(self.rank), len(ranks) + len(self.came))
        meeting.patience_s = JOIN_S
        next_s = time.monotonic() + LOOK_S

        def alert() -> None:
            nonlocal next_s
            self._look_after_guests()
            if time.monotonic() > next_s:
                self._look_after([self.places[rank] for rank in ranks if rank != self.rank])
                next_s = time.monotonic() + LOOK_S

        meeting.alert = alert
        return meeting, self.generation, ranks

    def _look_after_guests(self) -> None:
        """While waiting for them: the others are alive, and need not wait for long."""
        for place, guest in self.came:
            if place.look() != HERE:
                raise LinkError(f"{guest.host} was to be taken in and is gone")

    def _look_after(self, others: Sequence[Place]) -> None:
        """While waiting for those who were met a moment ago. Raises LinkError where one is gone by now."""
        seen = self._look(others)
        now = time.monotonic()
        for place in others:
            if seen[place.name] == GONE or now - self._silent.get(place.name, now) > DOUBT_S:
                raise LinkError(f"{place.host} was met again and is gone")

    def _reach(self, name: str) -> Meeting:
        return self._line(next(place for place in self.places if place.name == name), self.rank, len(self.places))

    def _line(self, host: Place, rank: int, size: int) -> Meeting:
        point = self.point if host is self.me else None
        return Meeting(host.address, host.port, self.secret, rank, size, TURN_S, point)

    def _ask(self, place: Place, token: str) -> dict[str, Any] | None:
        """What has been decided there; None where nobody answers, or decides yet."""
        if self._look([place])[place.name] != HERE:
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
                            return {"generation": self.generation, "refused": WITHOUT}
                        ask_s = time.monotonic() + ASK_S
                    for key in (f"decided/{token}", f"without/{self.me.name}"):
                        if meeting.check([key]):
                            found: dict[str, Any] = json.loads(meeting.get(key))
                            return found
                    time.sleep(GLANCE_S)
                meeting.delete_key(f"call/{self.me.name}")
            finally:
                meeting.close()
        return None

    def _decide(self, end: float) -> dict[str, Any] | None:
        """As the lowest that answers; None where a lower one answers after all."""
        others = [place for place in self.places if place is not self.me]
        ask_s = time.monotonic() + ASK_S
        meeting = self._line(self.me, self.rank, len(self.places))
        try:
            while True:
                seen = self._look(others)
                now = time.monotonic()
                if any(seen[place.name] == HERE for place in self.places[: self.rank]):
                    return None
                calls = {p.name: meeting.get(f"call/{p.name}") for p in others if meeting.check([f"call/{p.name}"])}
                # who called and died is gone
                came = [p for p in others if p.name in calls and seen[p.name] != GONE]
                missing = [p for p in others if p not in came and seen[p.name] != GONE]
                if all(now - self._silent.get(place.name, now) > DOUBT_S for place in missing) or now > end:
                    return self._tell(meeting, came, missing, calls)
                self._mention([place for place in missing if seen[place.name] == HERE])
                if now > ask_s:
                    if any(self._went_on(place) for place in missing if seen[place.name] == HERE):
                        return {"generation": self.generation, "refused": WITHOUT}
                    ask_s = time.monotonic() + ASK_S
                time.sleep(PAUSE_S)
        finally:
            meeting.close()

    def _mention(self, others: Sequence[Place]) -> None:
        if others and time.monotonic() > self._mentions_s:
            self._mentions_s = math.inf
            who = ", ".join(f"rank {self.places.index(place)} on {place.host}" for place in others)
            self.notice(
                f"{self} has been meeting those who are left for {NOTICE_S:.0f} s, and waits for {who}: alive, "
                f"and not there yet; it may be computing its step"
            )

    def _went_on(self, place: Place) -> bool:
        """Whether it is in a later generation, and this one is not."""
        with contextlib.suppress(LinkError):
            meeting = self._line(place, self.rank, len(self.places))
            try:
                if int(meeting.get(GENERATION)) > self.generation:
                    told = json.loads(meeting.get(MEMBERS))  # at least as new
                    return self.me.name not in [Place.read(text.encode()).name for text in told]
            finally:
                meeting.close()
        return False

    def _look(self, places: Sequence[Place]) -> dict[str, str]:
        if not places:
            return {}
        with ThreadPoolExecutor(min(32, len(places))) as crowd:
            seen = dict(zip((p.name for p in places), crowd.map(self._see, places), strict=True))
        for name, how in seen.items():
            if how == HERE:
                self._silent.pop(name, None)
            elif how == SILENT or self._still_s or name in self._silent:
                if how == GONE:
                    self._doubted.add(name)
                seen[name] = SILENT
                self._silent.setdefault(name, time.monotonic())
        return seen

    def _see(self, place: Place) -> str:
        how = place.look()
        if how == HERE:
            return HERE
        return GONE if self._witness.ended(place.name, HANG_UP_S if how == REFUSED else 0.0) else SILENT

    def _tell(
        self, meeting: Meeting, came: Sequence[Place], silent: Sequence[Place], calls: dict[str, bytes]
    ) -> dict[str, Any]:
        going = [place for place in self.places if place is self.me or place in came]
        said = [calls[place.name].decode().split() for place in came]
        decided = {
            "generation": 1 + max(self.generation, *(int(generation) for _, generation in said), 0),
            "names": [place.name for place in going],
            "refused": self._refusal(going, silent),
        }
        asking = self.waiting() if self._admits and not decided["refused"] else {}
        # who has asked again since is not the one that was to be taken in
        guests = [guest for guest in self._admits if asking.get(guest.name, {}).get("turn") == guest.turn]
        decided["guests"] = [(asking[guest.name]["place"], asdict(guest)) for guest in guests]
        told = {"decided": decided, "members": [place.write() for place in going], "least": self.least}
        for guest in guests:
            self.answer(guest.name, told)
        for token, _ in said:
            meeting.set(f"decided/{token}", json.dumps(decided))
        for place in self.places:
            meeting.delete_key(f"call/{place.name}")
            if place not in going:
                meeting.set(f"without/{place.name}", json.dumps({**decided, "refused": decided["refused"] or WITHOUT}))
        return decided

    # who comes late

    def waiting(self) -> dict[str, dict[str, Any]]:
        if not self.point.num_leased and not (self.hatch and self.hatch.here):
            self._shut()
            return {}  # as in nearly every step
        asked = {name: json.loads(words) for name, words in self.point.posted(GUEST).items()}
        asked = {name: said for name, said in asked.items() if said.keys() >= ASKS}
        for name in self.point.posted(ANSWER).keys() - asked.keys():
            self.point.remove(ANSWER + name)
        if self.hatch:
            for name in self.hatch.here.keys() - asked.keys():
                self.hatch.here.pop(name).close()
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

    def _shut(self) -> None:
        """What listens for those who come late does so while somebody asks."""
        if self.hatch:
            self.hatch.close()
            self.hatch = None

    def answer(self, name: str, said: dict[str, Any]) -> None:
        if asked := self.waiting().get(name):
            self._post(name, said, asked)

    def _post(self, name: str, said: dict[str, Any], asked: dict[str, Any]) -> None:
        self.hatch = self.hatch or Hatch(self.me.address, self.secret)
        told = {**said, "turn": asked["turn"], "hatch": [self.hatch.address, self.hatch.port]}
        self.point.post(ANSWER + name, json.dumps(told))

    def line(self, name: str) -> Bulk:
        end = time.monotonic() + TURN_S
        while self.hatch is None or name not in self.hatch.here:
            if time.monotonic() > end:
                raise LinkError(f"{name} did not come to be given anything")
            time.sleep(GLANCE_S)
        return self.hatch.here[name]

    def _refusal(self, going: Sequence[Place], silent: Sequence[Place]) -> str:
        """Why they may not go on; empty where they may."""
        where = {place.name: rank for rank, place in enumerate(self.places)}
        lowest = min((*going, *silent), key=lambda place: where[place.name])
        if len(going) < len(silent) or (len(going) == len(silent) and lowest in silent):
            who = ", ".join(f"rank {where[place.name]} on {place.host}" for place in silent)
            if self._still_s and self._doubted & {place.name for place in silent}:
                return (
                    f"this process stood still, or heard nothing of another one, for {self._still_s:.0f} s, and {who} "
                    f"may have gone on without it, and ended; start it again, with --resume if training has not ended"
                )
            return (
                f"cut off from {who}, and the larger part of a run goes on, of two equal parts that with the lowest "
                f"rank; mend the network, and start this node again"
            )
        if len(going) < self.least:
            return (
                f"{len(going)} of {len(self.places)} nodes are left, and at least {self.least} are asked for "
                "(--nodes); start the run again, with --resume, when there are enough"
            )
        return ""


def _node(name: str) -> str:
    """Which of the run's nodes has this name; each life of a node has another."""
    return name.partition("-")[0]
