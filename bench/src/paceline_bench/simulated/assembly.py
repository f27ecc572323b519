"""Membership after a failure in virtual time: as `elastic/reconfigure.py`, and by the same rule (`quorum`).

each        goes to the lowest that answers, and waits there; the one below which nobody answers waits itself
it waits    until every other has come, or is gone for certain, or has been silent for long
decision    `quorum.decide`; one that is cut off keeps looking for the others for WAIT_S
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.elastic.quorum import ALIVE, MemberHistory, MemberStatus, QuorumDecision, QuorumVerdict, decide
from paceline.errors import LinkError
from paceline.transport import Joiner
from paceline_bench.simulated.virtual_time import Place, World

SUSPECT_AFTER_S = 6.0  # without an answer, before a member counts as silent
ALIVE_TIMEOUT_S = 20.0  # for those who are alive: longer than who comes last may have been waiting in vain
POLL_S = 2.0  # between two looks
WAIT_S = 200.0  # for those that one is cut off from
GIVE_UP_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """``heir``: the next generation; None for whom there is none, for the reason that was decided."""

    heir: Any
    decision: QuorumDecision


class Assembly:
    """``look(one, other)``: what the one finds where the other is. ``found(ids, joiners)``: makes the next generation.
    ``doubts(one)``: whether it has stood still, or heard nothing, for so long that all others may have continued."""

    def __init__(
        self,
        world: World,
        look: Callable[[int, int], str],
        found: Callable[[Sequence[int], Sequence[Joiner]], Any],
        doubts: Callable[[int], bool] = lambda one: False,
    ):
        self.world, self.look, self.found, self.doubts = world, look, found, doubts
        self.calls: defaultdict[int, set[int]] = defaultdict(set)  # by host: who waits there
        self.said: dict[tuple[int, int], Outcome] = {}  # by host, and to whom
        self.num_gone = 0
        self.place: Place = []

    def reconfigure(self, me: int, ids: Sequence[int], admits: Sequence[Joiner] = ()) -> Any:
        """The next generation, of members ``ids`` of the last one, and of whom the one that decides ``admits``. Raises
        LinkError."""
        world, hosts_since, cut_since = self.world, math.inf, math.inf
        others = [other for other in ids if other != me]
        history: MemberHistory[int] = MemberHistory(frozenset(others) if self.doubts(me) else frozenset())
        end = world.clock + GIVE_UP_S
        while world.clock < end:
            history = history.after({other: self.look(me, other) for other in others}, self.calls[me], world.clock)
            host = min((other for other in others if other < me and history.seen[other] == ALIVE), default=me)
            if host == me:
                hosts_since = min(hosts_since, world.clock)
                late = world.clock - hosts_since >= ALIVE_TIMEOUT_S
                found = {other: history.status(other, self.calls[me], world.clock, SUSPECT_AFTER_S) for other in others}
                found = {
                    o: MemberStatus.SILENT if late and how is MemberStatus.EXPECTED else how for o, how in found.items()
                }
                decision = decide(
                    [found.get(each, MemberStatus.PRESENT) for each in ids], names=[f"rank {each}" for each in ids]
                )
                if decision.verdict is not QuorumVerdict.WAIT:
                    return self._decide(me, ids, found, decision, admits)
                cut_off = MemberStatus.EXPECTED not in found.values()
                cut_since = min(cut_since, world.clock) if cut_off else math.inf
                if world.clock - cut_since >= WAIT_S:
                    return self._decide(
                        me, ids, found, QuorumDecision(QuorumVerdict.RESTORE, why=f"{decision.why}; in vain")
                    )
            else:
                hosts_since = math.inf
                self.calls[host].add(me)
            if outcome := self._wait(me, host):
                return self._taken(me, outcome)
        raise LinkError(f"rank {me} met none of the others again within {GIVE_UP_S:.0f} s")

    def admitted(self, me: int) -> Any:
        """The generation that a joining node was admitted to; None as long as it was not."""
        heard = [said for (_, whom), said in self.said.items() if whom == me]
        return self._taken(me, heard[0]) if heard else None

    def look_again(self) -> None:
        """Somebody is gone."""
        self.num_gone += 1
        self.world.notify(self.place)

    def _wait(self, me: int, host: int) -> Outcome | None:
        came, gone = len(self.calls[me]), self.num_gone
        self.world.notify(self.place)

        def news() -> bool:
            more = host == me and len(self.calls[me]) != came
            return more or self.num_gone != gone or (host, me) in self.said

        self.world.wait(news, POLL_S, self.place)
        self.calls[host].discard(me)
        return self.said.get((host, me))

    def _decide(
        self,
        me: int,
        ids: Sequence[int],
        found: dict[int, MemberStatus],
        decision: QuorumDecision,
        admits: Sequence[Joiner] = (),
    ) -> Any:
        going = [each for each in ids if found.get(each, MemberStatus.PRESENT) is MemberStatus.PRESENT]
        joiners = [joiner for joiner in admits if self.look(me, int(joiner.name)) == ALIVE]
        outcome = Outcome(self.found(going, joiners) if decision.quorum else None, decision)
        self.said |= {(me, int(joiner.name)): outcome for joiner in joiners}
        without = Outcome(None, decide([MemberStatus.AHEAD]) if decision.quorum else decision)
        for other in ids:
            self.said[me, other] = outcome if other in going else without
        self.calls[me].clear()
        self.world.notify(self.place)
        return self._taken(me, outcome)

    def _taken(self, me: int, outcome: Outcome) -> Any:
        """What others have said to it is of the past."""
        self.said = {key: said for key, said in self.said.items() if key[1] != me}
        if not outcome.decision.quorum:
            words = f"rank {me}: {outcome.decision.verdict.value}: {outcome.decision.why}"
            raise LinkError(words, resumes=outcome.decision.verdict is QuorumVerdict.RESTORE)
        return outcome.heir
