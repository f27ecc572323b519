"""Admission of a joining node between two steps, by the members of the run.

    request                 the node asks the leader, at the leader's store, for the position of the training
    meanwhile               it receives a copy of the weights, and every update since, until it has caught up
    a vote                  tells all members that nodes wait, and in which generation they become members
    before the next step    all rendezvous, the new node as the last rank; the leader sends it the remaining state
    that step               is computed by all
    below the minimum       no step is taken before joining nodes are enough (`below_minimum`)

*Invariants*: a node with another script, model or version, or one that is a member already, is refused with the reason,
and training does not stop for it; a node that fails while it is admitted costs the others one step at most.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from paceline.contract import GlobalBatch
from paceline.elastic import state_transfer
from paceline.elastic.below_minimum import Waiter, enough, wait
from paceline.elastic.catch_up import CatchUp
from paceline.elastic.consistency import unlike
from paceline.environment import wait_s
from paceline.errors import LinkError
from paceline.messages import StepOutcome, UpdateRule, Vote
from paceline.report.log import log
from paceline.report.step_observer import StepObserver
from paceline.step.average import average
from paceline.step.run_state import RunState
from paceline.transport import JoinDesk, Joiner, ViewChange

MAX_ATTEMPTS = 2  # rendezvous to admit the same node
ATTEMPTS_FAILED = f"all members waited for it at {MAX_ATTEMPTS} rendezvous, in vain; look at the network and restart it"
OTHER_VERSION = {"refused": "it runs another version of paceline; install the same on every node"}
FIELDS = {"said": dict, "host": str, "size": int, "least": int, "most": int, "turn": int}  # of a request
LATER_FIELDS = {"began": int, "data": dict}  # once it knows the position
SELDOM = "its exchange does not synchronise on every step, so it admits no joining node"
OWN_ROWS = "the script assigns its own rows to processes; only pace.batches can assign rows to a joining node"


class Admission(StepObserver, Waiter):
    """Of every process of every member. ``digests``: those of this process's job (`consistency.digests`). ``ends``:
    ends the training after a signal; ``gives_up``: saves it, to be resumed later. Both raise."""

    def __init__(
        self, run: RunState, digests: dict[str, str], ends: Callable[[int], None], gives_up: Callable[[str], None]
    ):
        self.run, self.digests, self._ends, self._gives_up = run, digests, ends, gives_up
        self.joined: tuple[Joiner, ...] = ()  # at the last membership change
        self._ready: list[Joiner] = []
        self._flags = 0, False  # of its vote: the generation that admits the ready nodes; whether state is streamed
        self._answered: dict[str, int] = {}
        self._catch_ups: dict[str, CatchUp] = {}  # in the leader
        self._failed_attempts: dict[str, int] = {}
        self._began = -1
        self._refuses = ""  # why no node can be admitted
        self._missing: list[str] = []  # hosts that failed, and have not come back
        self._waits_s = 0.0  # since when, on `time.monotonic`
        self._limit_s = wait_s()

    def before(self, batch: GlobalBatch, own: bool) -> None:
        """Every process must call it before each step. ``own``: of a loop of the user's own."""
        run = self.run
        self._refuses = OWN_ROWS if own or batch.epoch is None else SELDOM if run.exchange.consensus != "step" else ""
        # a joining node enters the same call of `batches`, so that it ends with the others
        if run.last.vote.join_generation > run.control.generation and run.cursor.began == self._began and not own:
            self.admit()
        self._began = run.cursor.began
        if self._streams(run.last):
            self._copy()
        if run.leader:
            self._handle_requests()
        self._wait_for_minimum()
        # when a step is retried among other members, this names a generation that exists already
        self._flags = (run.control.generation + 1 if self._ready else 0, bool(self._catch_ups))

    def votes(self, vote: Vote) -> None:
        vote.join_generation, vote.state_streaming = self._flags

    def again(self, step: int, outcome: StepOutcome) -> None:
        self._wait_for_minimum()

    def on_view_change(self, change: ViewChange) -> None:
        self.joined = change.joined
        self._missing += change.lost
        for joiner in change.joined:
            if joiner.host in self._missing:
                self._missing.remove(joiner.host)

    # below the minimum

    def _wait_for_minimum(self) -> None:
        run = self.run
        if enough(self.num_nodes, self.minimum):
            return
        self._waits_s = time.monotonic()
        hope = f"{self._missing_names} may come back within {self._limit_s:.0f} s (--wait)"
        text = (
            f"{self.num_nodes} of at least {self.minimum} nodes (--nodes) {'is' if self.num_nodes == 1 else 'are'} "
            f"left at step {run.num_steps}, with everything in memory; {self._refuses or hope}"
        )
        if run.leader:
            log.warning(text)
        run.record.write("wait", step=run.num_steps, num_nodes=self.num_nodes, minimum=self.minimum, text=text)
        if run.exchange.divides_optimizer:
            average(run, state=True)  # what a lost node had is on one node alone
        with run.activity.at(f"waiting for {self._missing_names} to come back"):
            wait(self, run.control, time.sleep)
        run.record.write("waited", step=run.num_steps, seconds=time.monotonic() - self._waits_s)

    @property
    def _missing_names(self) -> str:
        return ", ".join(self._missing) or "missing nodes"

    @property
    def num_nodes(self) -> int:
        return int(self.run.world.num_nodes)

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return int(self.run.world.min_nodes)

    def report(self) -> dict[str, Any]:
        run = self.run
        if run.leader:
            self._handle_requests()
        # a node that has caught up waits for others that soon will, unless it makes the nodes enough
        catching_up = [each for each in self._catch_ups.values() if not each.caught_up and not each.diverging]
        admits = self._ready and (enough(self.num_nodes + len(self._ready), self.minimum) or not catching_up)
        in_vain = bool(self._refuses) or time.monotonic() - self._waits_s > self._limit_s
        return {
            "guests": run.control.generation + 1 if admits else 0,
            "follows": bool(self._catch_ups),
            "stop": run.stop_signal,
            "hung": run.launcher_lost,
            "over": in_vain and not self._catch_ups,
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
        self._gives_up(f"{few}: {self._missing_names} did not come back within {self._limit_s:.0f} s (--wait)")

    def begin_again(self) -> None:
        """The state sent so far is another one: each joining node receives all of it again."""
        for catch_up in self._catch_ups.values():
            catch_up.end(False)
        self._catch_ups = {}

    def _streams(self, outcome: StepOutcome) -> bool:
        """Known to every process of the leader's node."""
        return outcome.vote.state_streaming and self.run.world.node == 0

    def _copy(self) -> bool:
        """Copies the next part for each joining node that has a free buffer. Whether there was any."""
        run = self.run
        takers = [each for each in self._catch_ups.values() if each.has_buffer]
        wanted = json.dumps([each.next for each in takers]).encode()
        parts = json.loads(bytes(run.control.node_broadcast(wanted)))
        for i, rows in enumerate(parts):
            part = state_transfer.state_part(run, rows)
            if run.leader:
                takers[i].part(part)
        return bool(parts)

    def _handle_requests(self) -> None:
        desk = self.run.members.join_desk
        requests = desk.waiting() if desk else {}
        self._ready = []
        self._answered = {name: turn for name, turn in self._answered.items() if name in requests}
        for name in self._catch_ups.keys() - requests.keys():
            self._catch_ups.pop(name).stop()
        for name, request in requests.items():
            if self._answered.get(name) != request["turn"]:
                assert desk
                response = self._answer(desk, name, request) if _is_ours(request) else OTHER_VERSION
                if response is not None:
                    desk.answer(name, response)
                    self._answered[name] = request["turn"]

    def _answer(self, desk: JoinDesk, name: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """None for a node that will be admitted: the rendezvous is its response."""
        run = self.run
        if why := self._refuses or self._refusal(request):
            log.warning(f"{request['host']} asked to join and was refused: {why}")
            return {"refused": why}
        in_vain = self._failed_attempts.get(name, 0) >= MAX_ATTEMPTS
        if in_vain or "began" not in request:
            if old := self._catch_ups.pop(name, None):
                old.stop()  # its connection has closed, or is not to be used
            position = [run.cursor.epoch, run.cursor.next_step, run.cursor.began]
            return {"refused": ATTEMPTS_FAILED} if in_vain else {"position": position}
        if request["began"] < run.cursor.began:
            return {"over": True}
        if request["began"] > run.cursor.began:
            return None
        if why := unlike(run.cursor.facts, [request["data"]]):
            return {"refused": why}
        # a leader that has a part of the optimizer's state cannot send it ahead: the node gets it when it is admitted
        if not run.exchange.divides_optimizer:
            if name not in self._catch_ups:
                self._catch_ups[name] = CatchUp(run, desk, name)
            catch_up = self._catch_ups[name]
            if catch_up.broken:
                return None  # the node notices that, and sends another request
            if catch_up.failed:
                self._catch_ups.pop(name).stop()
                return {"refused": catch_up.failed}
            if not catch_up.caught_up and not catch_up.diverging:
                return None
        least, most = request["least"], request["most"]
        self._ready.append(Joiner(name, request["host"], request["size"], least, most, request["turn"]))
        return None

    def applies(self, outcome: StepOutcome, rule: UpdateRule) -> Callable[[], None]:
        applied = [each.before_update(outcome, rule) for each in self._catch_ups.values()]
        if self._streams(outcome):
            self.run.control.node_broadcast(b"")  # no process's update changes sums that are not copied yet

        def all_applied() -> None:
            for each in applied:
                each()

        return all_applied

    def _refusal(self, request: dict[str, Any]) -> str:
        mine, its = self.digests, request["said"]
        if different := [name for name in mine if its.get(name) != mine[name]]:
            return (
                f"it was given different {', '.join(different)}; start it with the same script, arguments, data and "
                f"versions"
            )
        most = os.environ.get("PACELINE_NODES", "").partition(":")[2]
        num_nodes = self.run.world.num_nodes + len(self._ready)
        if most and num_nodes >= int(most):
            return f"{num_nodes} nodes train, or are about to; at most {most} are allowed (--nodes)"
        return ""

    def _admit_ready(self) -> tuple[Joiner, ...]:
        self.joined = ()
        self.run.control.admit(self._ready)
        return self.joined

    def admit(self) -> None:
        run, begin = self.run, time.perf_counter()
        average(run, state=True)
        joined = self._admit_ready()
        for joiner in self._ready if not joined else ():
            self._failed_attempts[joiner.name] = self._failed_attempts.get(joiner.name, 0) + 1
        if not joined or run.world.node:
            return
        catch_ups = {joiner.name: self._catch_ups.pop(joiner.name, None) for joiner in joined}
        caught_up = {name: each is not None and each.end(not each.diverging) for name, each in catch_ups.items()}
        all_caught_up = b"level" if all(caught_up.values()) else b""
        small = state_transfer.small_state(run)
        large = {} if run.control.node_broadcast(all_caught_up) else state_transfer.full_state(run)
        if not run.leader:
            return
        for joiner in joined:
            message = state_transfer.Message(small if caught_up[joiner.name] else {**large, **small})
            ahead = catch_ups[joiner.name]
            try:
                assert run.members.join_desk
                channel = (ahead and ahead.channel) or run.members.join_desk.channel(joiner.name)
                channel.set_deadline_mode()
                channel.send(message.parts(), message.num_bytes)
            except LinkError as error:  # the next operation detects the failure, as for any other member
                log.warning(f"{joiner.host}: {error}")
            run.record.write(
                "welcome",
                step=run.num_steps,
                host=joiner.host,
                num_bytes=message.num_bytes,
                ahead_bytes=ahead.num_bytes if ahead else 0,
                seconds=time.perf_counter() - begin,
            )


def _is_ours(request: dict[str, Any]) -> bool:
    """Whether a request has the fields of this version."""
    fields = FIELDS | (LATER_FIELDS if "began" in request else {})
    return all(isinstance(request.get(name), kind) for name, kind in fields.items())
