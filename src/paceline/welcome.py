"""A node that comes late is taken in between two steps. ``pace`` is `pace.Pace`.

    it asks                 the leader, at its own meeting point, and is told where training is
    meanwhile               it is given a copy of the weights, and every update since, until it is level
    a vote                  says to all that somebody waits, and in which generation it is to be a member
    before the next step    all meet, the new one as the last rank; the leader gives it the rest
    that step               is everyone's

*Laws*: who has another script, model or version, or is here already, is refused by name, and nobody stands still for
it; who dies while it is taken in costs the others a step at most.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from paceline import handover
from paceline.compare import unlike
from paceline.contract import Agreement, Guest, LinkError, Porter, Rule
from paceline.following import Following

MOST_VAIN = 2  # times that all meet to take the same one in
IN_VAIN = f"all met to take it in, {MOST_VAIN} times, and it did not come; look at the network, and start it again"
OWN = "the script that trains deals its rows itself, and only pace.batches can deal them to another node"


class Welcome:
    """Of every process of every member. ``said``: what `compare.digests` says of this one."""

    def __init__(self, pace: Any, said: dict[str, str]):
        self.pace, self.said = pace, said
        self.came: tuple[Guest, ...] = ()  # by the last change of members
        self._ready: list[Guest] = []
        self._answered: dict[str, int] = {}
        self._following: dict[str, Following] = {}  # in the process that leads
        self._vain: dict[str, int] = {}
        self._began = -1

    def before(self, batch: Any, own: bool) -> None:
        """Every process must call it before each step. ``own``: of a loop of the user's own."""
        pace = self.pace
        # whoever comes is in the same call of `batches`, so that it ends with the others
        if pace.agreement.ballot.guests > pace.exchange.link.generation and pace.began == self._began and not own:
            self._admit()
        self._began = pace.began
        if self._follows(pace.agreement):
            self._copy()
        if pace.leader:
            self._look(own or not hasattr(batch, "epoch"))
            pace.loop.guests = pace.exchange.link.generation + 1 if self._ready else 0
            pace.loop.follows = bool(self._following)

    def begin_again(self) -> None:
        """What those who follow were given is of another state: they are given all of it anew."""
        for following in self._following.values():
            following.end(False)
        self._following = {}

    def _follows(self, agreement: Agreement) -> bool:
        """Known to every process of the node that leads."""
        return agreement.ballot.follows and self.pace.world.node == 0

    def _copy(self) -> None:
        """The next part for each who follows, as soon as there is a place for it."""
        pace = self.pace
        takers = [each for each in self._following.values() if each.placed]
        wanted = json.dumps([each.next for each in takers]).encode()
        for i, rows in enumerate(json.loads(bytes(pace.exchange.hand(wanted)))):
            part = handover.part(pace, rows)
            if pace.leader:
                takers[i].part(part)

    def _look(self, own: bool) -> None:
        porter = self.pace.ledger.porter
        asked = porter.waiting() if porter else {}
        self._ready = []
        self._answered = {name: turn for name, turn in self._answered.items() if name in asked}
        for name in self._following.keys() - asked.keys():
            self._following.pop(name).stop()
        for name, said in asked.items():
            if self._answered.get(name) != said["turn"]:
                assert porter
                try:
                    told = self._answer(porter, name, said, own)
                except (LookupError, TypeError):
                    told = {"refused": "it asks as another version of paceline does; install the same on every node"}
                if told is not None:
                    porter.answer(name, told)
                    self._answered[name] = said["turn"]

    def _answer(self, porter: Porter, name: str, said: dict[str, Any], own: bool) -> dict[str, Any] | None:
        """None for whom the answer is to be taken in, which is still to come."""
        pace = self.pace
        if why := OWN if own else self._refusal(said):
            print(f"paceline: {said['host']} asked to be taken in, and is not: {why}", file=sys.stderr)
            return {"refused": why}
        if self._vain.get(name, 0) >= MOST_VAIN:
            return {"refused": IN_VAIN}
        if "began" not in said:
            if lost := self._following.pop(name, None):
                lost.stop()  # the line on which it was given a part is no more
            return {"position": [pace.epoch, pace.next_step, pace.began]}
        if said["began"] < pace.began:
            return {"over": True}
        if said["began"] > pace.began:
            return None
        if why := unlike(pace._data, [said["data"]]):
            return {"refused": why}
        if name not in self._following:
            self._following[name] = Following(pace, porter, name)
        following = self._following[name]
        if following.broken:
            return None  # it hears of it, and asks anew
        if following.lost:
            del self._following[name]
            return {"refused": following.lost}
        if not following.level and not following.hopeless:
            return None
        self._ready.append(Guest(name, said["host"], said["size"], said["least"], said["most"], said["turn"]))
        return None

    def keep(self, agreement: Agreement, rule: Rule) -> Callable[[], None]:
        """Before an update; what this gives is called once it was applied."""
        applied = [following.before(agreement, rule) for following in self._following.values()]
        if self._follows(agreement):
            self.pace.exchange.hand(b"")  # no process's update changes sums that are not copied yet

        def all_applied() -> None:
            for each in applied:
                each()

        return all_applied

    def _refusal(self, said: dict[str, Any]) -> str:
        mine, its = self.said, said["said"]
        if different := [name for name in mine if its.get(name) != mine[name]]:
            return (
                f"it was given different {', '.join(different)}; start it with the same script, arguments, data and "
                f"versions"
            )
        most = os.environ.get("PACELINE_NODES", "").partition(":")[2]
        num_nodes = self.pace.world.num_nodes + len(self._ready)
        if most and num_nodes >= int(most):
            return f"{num_nodes} nodes train, or are about to, and there are to be at most {most} (--nodes)"
        return ""

    def _meet(self) -> tuple[Guest, ...]:
        self.came = ()
        self.pace.exchange.admit(self._ready)
        return self.came

    def _admit(self) -> None:
        pace, begin = self.pace, time.perf_counter()
        came = self._meet()
        for guest in self._ready if not came else ():
            self._vain[guest.name] = self._vain.get(guest.name, 0) + 1
        if not came or pace.world.node:
            return
        following = {guest.name: self._following.pop(guest.name, None) for guest in came}
        level = {name: each is not None and each.end(not each.hopeless) for name, each in following.items()}
        all_level = b"level" if all(level.values()) else b""
        rest, large = handover.rest(pace), {} if pace.exchange.hand(all_level) else handover.copy(pace)
        if not pace.leader:
            return
        for guest in came:
            message = handover.Message(rest if level[guest.name] else {**large, **rest})
            ahead = following[guest.name]
            try:
                line = (ahead and ahead.line) or pace.ledger.porter.line(guest.name)
                line.hurry()
                line.send(message.parts(), message.num_bytes)
            except LinkError as error:  # the next operation finds out, as for any other member
                print(f"paceline: {guest.host}: {error}", file=sys.stderr)
            pace.record.write(
                "welcome",
                step=pace.loop.num_steps,
                host=guest.host,
                num_bytes=message.num_bytes,
                ahead_bytes=ahead.num_bytes if ahead else 0,
                seconds=time.perf_counter() - begin,
            )
