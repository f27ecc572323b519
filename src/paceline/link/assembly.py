"""Who goes on after a loss, in virtual time: by the rules of `link/survivors.py`.

    each        goes to the lowest that answers, and waits there; the one below whom nobody answers waits itself
    who waits   until every other has come, or is gone for certain, or has been silent for long
    goes on     who has come, where they are more than the silent ones; of two equal parts, that with the lowest rank

*Laws*: two parts never both go on; whoever does not is told why.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.contract import LinkError
from paceline.link.virtual import Place, World

HERE, GONE, SILENT = "here", "gone", "silent"
DOUBT_S = 6.0  # without an answer, before a member counts as silent
LATE_S = 20.0  # for those who are alive: longer than who comes last may have been waiting in vain
PAUSE_S = 2.0  # between two looks
GIVE_UP_S = 300.0


@dataclass(frozen=True)
class Decision:
    """``heir``: the next generation; None for whom there is none, and ``refusal`` says why."""

    heir: Any
    refusal: str = ""


class Assembly:
    """``look(one, other)``: what the one finds where the other is. ``found(ids)``: makes the next generation."""

    def __init__(self, world: World, look: Callable[[int, int], str], found: Callable[[Sequence[int]], Any]):
        self.world, self.look, self.found = world, look, found
        self.calls: defaultdict[int, set[int]] = defaultdict(set)  # by host: who waits there
        self.said: dict[tuple[int, int], Decision] = {}  # by host, and to whom
        self.num_gone = 0
        self.place: Place = []

    def meet(self, me: int, ids: Sequence[int]) -> Decision:
        """What was decided, among the members ``ids`` of the last generation. Raises LinkError."""
        world, hosts_since, silent_since = self.world, math.inf, dict[int, float]()
        doubted = set[int]()  # have been silent in this meeting: who is gone then may have gone on, and ended
        end = world.clock + GIVE_UP_S
        while world.clock < end:
            seen = {other: self.look(me, other) for other in ids if other != me}
            seen |= {other: SILENT for other, how in seen.items() if how == GONE and other in doubted}
            doubted = {other for other, how in seen.items() if how == SILENT}
            host = min((other for other in seen if other < me and seen[other] == HERE), default=me)
            if host == me:
                hosts_since = min(hosts_since, world.clock)
                silent_since = {o: silent_since.get(o, world.clock) for o, how in seen.items() if how == SILENT}
                came = [other for other in seen if seen[other] != GONE and other in self.calls[me]]
                missing = [other for other in seen if seen[other] != GONE and other not in came]
                enough = all(world.clock - silent_since.get(other, world.clock) >= DOUBT_S for other in missing)
                if enough or world.clock - hosts_since >= LATE_S:
                    return self._decide(me, ids, came, missing)
            else:
                hosts_since, silent_since = math.inf, {}
                self.calls[host].add(me)
            if decision := self._wait(me, host):
                return decision
        raise LinkError(f"rank {me} met none of the others again within {GIVE_UP_S:.0f} s")

    def look_again(self) -> None:
        """Somebody is gone."""
        self.num_gone += 1
        self.world.notify(self.place)

    def _wait(self, me: int, host: int) -> Decision | None:
        came, gone = len(self.calls[me]), self.num_gone
        self.world.notify(self.place)

        def news() -> bool:
            more = host == me and len(self.calls[me]) != came
            return more or self.num_gone != gone or (host, me) in self.said

        self.world.wait(news, PAUSE_S, self.place)
        self.calls[host].discard(me)
        return self._taken(me, self.said[host, me]) if (host, me) in self.said else None

    def _decide(self, me: int, ids: Sequence[int], came: Sequence[int], missing: Sequence[int]) -> Decision:
        going = sorted([me, *came])
        refusal = self.refusal(going, missing)
        decision = Decision(None if refusal else self.found(going), refusal)
        without = Decision(None, refusal or f"came too late: ranks {going} went on without it")
        for other in ids:
            self.said[me, other] = decision if other in going else without
        self.calls[me].clear()
        self.world.notify(self.place)
        return self._taken(me, decision)

    def _taken(self, me: int, decision: Decision) -> Decision:
        """What others have said to it is of the past."""
        self.said = {key: said for key, said in self.said.items() if key[1] != me}
        return decision

    def refusal(self, going: Sequence[int], missing: Sequence[int]) -> str:
        """Why they may not go on. Who is gone for certain counts for neither part."""
        if len(going) < len(missing) or (len(going) == len(missing) and min(missing) < min(going)):
            return f"is cut off from ranks {sorted(missing)}, of whom more are alive, or as many with the lowest rank"
        return ""
