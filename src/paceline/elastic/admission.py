"""Admission of a joining node between two steps, by the members of the run.

    it asks                 the leader, at its own meeting point, and is told where training is
    meanwhile               it is given a copy of the weights, and every update since, until it is level
    a vote                  says to all that somebody waits, and in which generation it is to be a member
    before the next step    all meet, the new one as the last rank; the leader gives it the rest
    that step               is everyone's
    below the minimum       no step is taken before joining nodes are enough (`below_minimum`)

*Laws*: who has another script, model or version, or is here already, is refused by name, and nobody stands still for
it; who dies while it is taken in costs the others a step at most.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from paceline.contract import GlobalBatch
from paceline.elastic import state_transfer
from paceline.elastic.below_minimum import WaitingMember, enough, wait
from paceline.elastic.catch_up import CatchUp
from paceline.elastic.consistency import unlike
from paceline.environment import wait_s
from paceline.errors import LinkError
from paceline.messages import StepOutcome, UpdateRule, Vote
from paceline.report.log import log
from paceline.report.step_observer import StepObserver
from paceline.step.run_state import RunState
from paceline.transport import JoinDesk, Joiner, ViewChange

MAX_VAIN = 2  # times that all meet to take the same one in
IN_VAIN = f"all met to take it in, {MAX_VAIN} times, and it did not come; look at the network, and start it again"
SELDOM = "its exchange does not agree on every step, and takes nobody in between"
OWN = "the script that trains deals its rows itself, and only pace.batches can deal them to another node"


class Admission(StepObserver, WaitingMember):
    """Of every process of every member. ``said``: what `consistency.digests` says of this one.

    ``ends``, ``gives_up``: end the training after a signal, or for now, all kept. Both raise.
    """

    def __init__(
        self, run: RunState, said: dict[str, str], ends: Callable[[int], None], gives_up: Callable[[str], None]
    ):
        self.run, self.said, self._ends, self._gives_up = run, said, ends, gives_up
        self.came: tuple[Joiner, ...] = ()  # by the last change of members
        self._ready: list[Joiner] = []
        self._flags = 0, False  # of its vote: when those are admitted who are ready; whether somebody is given state
        self._answered: dict[str, int] = {}
        self._following: dict[str, CatchUp] = {}  # in the process that leads
        self._vain: dict[str, int] = {}
        self._began = -1
        self._refuses = ""  # why nobody can come
        self._missing: list[str] = []  # hosts that were lost, and have not come back
        self._waits_s = 0.0  # since when, on `time.monotonic`
        self._limit_s = wait_s()

    def before(self, batch: GlobalBatch, own: bool) -> None:
        """Every process must call it before each step. ``own``: of a loop of the user's own."""
        run = self.run
        self._refuses = OWN if own or batch.epoch is None else SELDOM if run.exchange.consensus != "step" else ""
        # whoever comes is in the same call of `batches`, so that it ends with the others
        if run.last.vote.join_generation > run.control.generation and run.cursor.began == self._began and not own:
            self.admit()
        self._began = run.cursor.began
        if self._follows(run.last):
            self._copy()
        if run.leader:
            self._look()
        self._hold()
        # of a step that is computed again among others, this names a generation that has been
        self._flags = (run.control.generation + 1 if self._ready else 0, bool(self._following))

    def votes(self, vote: Vote) -> None:
        vote.join_generation, vote.state_streaming = self._flags

    def again(self, step: int, outcome: StepOutcome) -> None:
        self._hold()

    def note(self, news: ViewChange) -> None:
        """Other nodes from now on."""
        self.came = news.joined
        self._missing += news.lost
        for joiner in news.joined:
            if joiner.host in self._missing:
                self._missing.remove(joiner.host)

    # below the minimum

    def _hold(self) -> None:
        run = self.run
        if enough(self.num_nodes, self.minimum):
            return
        self._waits_s = time.monotonic()
        hope = f"{self._who} may come back within {self._limit_s:.0f} s (--wait)"
        text = (
            f"{self.num_nodes} of at least {self.minimum} nodes (--nodes) {'is' if self.num_nodes == 1 else 'are'} "
            f"left at step {run.num_steps}, with everything in memory; {self._refuses or hope}"
        )
        if run.leader:
            log.warning(text)
        run.record.write("wait", step=run.num_steps, num_nodes=self.num_nodes, minimum=self.minimum, text=text)
        with run.activity.at(f"waiting for {self._who} to come back"):
            wait(self, run.control, time.sleep)
        run.record.write("waited", step=run.num_steps, seconds=time.monotonic() - self._waits_s)

    @property
    def _who(self) -> str:
        return ", ".join(self._missing) or "missing nodes"

    @property
    def num_nodes(self) -> int:
        return int(self.run.world.num_nodes)

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return int(self.run.world.min_nodes)

    def look(self) -> dict[str, Any]:
        run = self.run
        if run.leader:
            self._look()
        # who is level waits for others that nearly are, unless it makes the nodes enough
        on_the_way = [each for each in self._following.values() if not each.caught_up and not each.diverging]
        admits = self._ready and (enough(self.num_nodes + len(self._ready), self.minimum) or not on_the_way)
        in_vain = bool(self._refuses) or time.monotonic() - self._waits_s > self._limit_s
        return {
            "guests": run.control.generation + 1 if admits else 0,
            "follows": bool(self._following),
            "stop": run.stop_signal,
            "hung": run.launcher_lost,
            "over": in_vain and not self._following,
        }

    def copy(self) -> bool:
        return self.run.world.node == 0 and self._copy()

    def end(self, number: int) -> None:
        if number:
            self._ends(number)
            return
        few = f"{self.num_nodes} of at least {self.minimum} nodes (--nodes) are left"
        if self._refuses:
            self._gives_up(f"{few}: {self._refuses}")
        self._gives_up(f"{few}: {self._who} did not come back within {self._limit_s:.0f} s (--wait)")

    def begin_again(self) -> None:
        """What those who follow were given is of another state: they are given all of it anew."""
        for following in self._following.values():
            following.end(False)
        self._following = {}

    def _follows(self, outcome: StepOutcome) -> bool:
        """Known to every process of the node that leads."""
        return outcome.vote.state_streaming and self.run.world.node == 0

    def _copy(self) -> bool:
        """The next part for each who follows, as soon as there is a place for it. Whether there was any."""
        run = self.run
        takers = [each for each in self._following.values() if each.placed]
        wanted = json.dumps([each.next for each in takers]).encode()
        parts = json.loads(bytes(run.control.node_broadcast(wanted)))
        for i, rows in enumerate(parts):
            part = state_transfer.state_part(run, rows)
            if run.leader:
                takers[i].part(part)
        return bool(parts)

    def _look(self) -> None:
        desk = self.run.members.join_desk
        asked = desk.waiting() if desk else {}
        self._ready = []
        self._answered = {name: turn for name, turn in self._answered.items() if name in asked}
        for name in self._following.keys() - asked.keys():
            self._following.pop(name).stop()
        for name, said in asked.items():
            if self._answered.get(name) != said["turn"]:
                assert desk
                try:
                    told = self._answer(desk, name, said)
                except (LookupError, TypeError):
                    told = {"refused": "it asks as another version of paceline does; install the same on every node"}
                if told is not None:
                    desk.answer(name, told)
                    self._answered[name] = said["turn"]

    def _answer(self, desk: JoinDesk, name: str, said: dict[str, Any]) -> dict[str, Any] | None:
        """None for whom the answer is to be taken in, which is still to come."""
        run = self.run
        if why := self._refuses or self._refusal(said):
            log.warning(f"{said['host']} asked to join and was refused: {why}")
            return {"refused": why}
        in_vain = self._vain.get(name, 0) >= MAX_VAIN
        if in_vain or "began" not in said:
            if lost := self._following.pop(name, None):
                lost.stop()  # the line on which it was given a part is no more, or not to be used
            position = [run.cursor.epoch, run.cursor.next_step, run.cursor.began]
            return {"refused": IN_VAIN} if in_vain else {"position": position}
        if said["began"] < run.cursor.began:
            return {"over": True}
        if said["began"] > run.cursor.began:
            return None
        if why := unlike(run.cursor.facts, [said["data"]]):
            return {"refused": why}
        if name not in self._following:
            self._following[name] = CatchUp(run, desk, name)
        following = self._following[name]
        if following.broken:
            return None  # it hears of it, and asks anew
        if following.lost:
            self._following.pop(name).stop()
            return {"refused": following.lost}
        if not following.caught_up and not following.diverging:
            return None
        self._ready.append(Joiner(name, said["host"], said["size"], said["least"], said["most"], said["turn"]))
        return None

    def applies(self, outcome: StepOutcome, rule: UpdateRule) -> Callable[[], None]:
        applied = [following.before(outcome, rule) for following in self._following.values()]
        if self._follows(outcome):
            self.run.control.node_broadcast(b"")  # no process's update changes sums that are not copied yet

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
        num_nodes = self.run.world.num_nodes + len(self._ready)
        if most and num_nodes >= int(most):
            return f"{num_nodes} nodes train, or are about to, and there are to be at most {most} (--nodes)"
        return ""

    def _meet(self) -> tuple[Joiner, ...]:
        self.came = ()
        self.run.control.admit(self._ready)
        return self.came

    def admit(self) -> None:
        run, begin = self.run, time.perf_counter()
        came = self._meet()
        for joiner in self._ready if not came else ():
            self._vain[joiner.name] = self._vain.get(joiner.name, 0) + 1
        if not came or run.world.node:
            return
        following = {joiner.name: self._following.pop(joiner.name, None) for joiner in came}
        level = {name: each is not None and each.end(not each.diverging) for name, each in following.items()}
        all_level = b"level" if all(level.values()) else b""
        rest = state_transfer.small_state(run)
        large = {} if run.control.node_broadcast(all_level) else state_transfer.full_state(run)
        if not run.leader:
            return
        for joiner in came:
            message = state_transfer.Message(rest if level[joiner.name] else {**large, **rest})
            ahead = following[joiner.name]
            try:
                assert run.members.join_desk
                line = (ahead and ahead.line) or run.members.join_desk.line(joiner.name)
                line.set_deadline_mode()
                line.send(message.parts(), message.num_bytes)
            except LinkError as error:  # the next operation finds out, as for any other member
                log.warning(f"{joiner.host}: {error}")
            run.record.write(
                "welcome",
                step=run.num_steps,
                host=joiner.host,
                num_bytes=message.num_bytes,
                ahead_bytes=ahead.num_bytes if ahead else 0,
                seconds=time.perf_counter() - begin,
            )
