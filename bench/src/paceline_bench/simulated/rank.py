"""One rank of a simulated training, and what it will be asked about: the engine, exchange, loop and data of any."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline import transport
from paceline.contract import Codec, Exchange
from paceline.data import batches
from paceline.data.load_balance import Limits
from paceline.data.sampler import Assignment
from paceline.elastic import assignment
from paceline.elastic.fault_tolerant import FaultTolerantControl
from paceline.environment import LaunchEnvironment
from paceline.errors import LinkError
from paceline.exchange import allreduce, diloco, ordered, server
from paceline.exchange.flow.control import Control
from paceline.link.memory import Members
from paceline.messages import Gradient, StepOutcome, Target, Vote
from paceline.report.activity import Activity
from paceline.report.step_observer import StepObserver
from paceline.step.rebalance import Rebalance
from paceline.step.replica_sync import ReplicaSync
from paceline.step.run_state import RunState
from paceline.step.step import step
from paceline.transport import ViewChange
from paceline_bench.simulated.fault_link import Net
from paceline_bench.simulated.node import Mesh
from paceline_bench.simulated.returns import Coming, Hall, Launcher, pack, unpack
from paceline_bench.simulated.scenarios import APART, BATCH, CLIP, QUIET, Kit, Restless, checksum, given, take, windows
from paceline_bench.simulated.schedule import Schedule

Attempt = tuple[int, int]  # at which step, of which generation
Average = Callable[..., Sequence[Target] | None]
OUTER_LR, OUTER_BETA = 0.7, 0.9


class Part(NamedTuple):
    """What a rank brings to an average."""

    weights: list[Tensor]
    samples: float
    size: int  # of the ranks that it averages with


@cache
def shares(seed: int, size: int) -> tuple[float, ...]:
    """Of each node, some of them without any rows."""
    dice = random.Random(f"shares {seed}")
    drawn = tuple(float(dice.choice((0, 1, 1, 2, 2, 3))) for _ in range(size))
    return drawn if any(drawn) else (1.0,) * size


def run_state(
    kit: Kit,
    exchange: Exchange,
    control: transport.Control,
    codec: Codec,
    members: transport.Membership,
    place: tuple[int, int],
    schedule: Schedule,
    identity: str,
    local_rank: int = 0,
) -> RunState:
    """Of a process. ``place``: its node, of how many."""
    how, (node, size) = schedule.how, place
    dealt = shares(schedule.seed, size) if how.uneven else None
    within = local_rank, how.processes
    limits = Limits((1,) * size, (BATCH,) * size)
    return RunState(
        kit.job,
        LaunchEnvironment(*within, node, size),
        kit.engine,
        exchange,
        control,
        codec,
        members,
        Assignment(node, size, *within, dealt, kit.engine.num_virtual_shards),
        limits,
        Restless(BATCH, limits.least, limits.most) if how.uneven and not how.virtual else None,
        identity=identity,
    )


def regroup(run: RunState, news: ViewChange) -> None:
    run.assignment, balance, run.limits = assignment.regroup(run.assignment, run.balance, BATCH, run.limits, news)
    run.balance = Restless(BATCH, balance.least, balance.most) if balance else None
    mine = run.assignment
    run.world = dataclasses.replace(run.world, node=mine.node, num_nodes=mine.num_nodes)


class Noted(StepObserver):
    """Tells its rank what begins, and what is offered."""

    def __init__(self, rank: Rank):
        self.rank = rank

    def offering(self, offer: Callable[[Gradient], None]) -> Callable[[Gradient], None]:
        self.rank.attempt = self.rank.now()

        def noted(gradient: Gradient) -> None:
            self.rank.offers(gradient)
            offer(gradient)

        return noted

    def averaged(self) -> None:
        self.rank.averaged()


class Held(StepObserver):
    """Where nodes return: those who are too few wait, before a step is computed again too."""

    def __init__(self, rank: Rank):
        self.rank = rank

    def votes(self, vote: Vote) -> None:
        vote.join_generation = self.rank.guests

    def again(self, step: int, outcome: StepOutcome) -> None:
        assert self.rank.hall
        self.rank.hall.hold()


class Rank:
    """It is its own source of samples. ``codec``: its memory moves with each applied step."""

    def __init__(
        self,
        members: Members,
        net: Net,
        schedule: Schedule,
        launcher: Launcher | None = None,
        mesh: Mesh | None = None,
    ):
        how, link = schedule.how, members.link
        _, self.x, self.y = given(how.normed)
        self.net, self.how, self.size = net, how, schedule.samples
        self.members, self.launcher, self.mesh = members, launcher, mesh
        self.id = members.who if isinstance(members, Coming) else link.rank
        self.taken: dict[Attempt, list[int]] = {}
        self._parts: dict[Attempt, dict[int, Sequence[int]]] = {}  # of these, by process of the node
        if mesh:
            mesh.taken = self.takes
        self.kit = take(how, mesh)
        self.model, self.engine, self.codec = self.kit.model, self.kit.engine, how.codec()
        if how.drifts and link.rank == link.size - 1:
            self.engine.weights[0].view(-1)[0] *= 1 + APART
        self.start = self.checksum() if how.drifts else 0
        self.exchange = self._exchange()
        plain = Control(members, votes=self.exchange.consensus == "step")
        own = FaultTolerantControl(plain, [self.exchange.rebuild, self.engine.reopen])
        self.exchange.open(self.engine, link, self.codec, -(-BATCH // link.size))
        local = self.engine.local_exchange(self.exchange, own, False, Activity()) if mesh else (self.exchange, own)
        self.control: transport.Control = local[1]
        self.run = run_state(self.kit, *local, self.codec, members, (link.rank, link.size), schedule, f"rank {self.id}")
        self.run.observers = [Noted(self), Rebalance(self.run)]
        if how.drifts:
            self.run.observers.insert(0, ReplicaSync(self.run, period=1, quiet_steps=QUIET))
        if how.normed:
            self.engine.sync_norm(link)
        self.hall = Hall(self, launcher, schedule.minimum, BATCH) if launcher else None
        if launcher:
            self.run.clip = CLIP
            self.run.observers.insert(0, Held(self))
        own.rows = lambda: self.run.assignment.rows_per_node(BATCH)[self.run.assignment.node]
        self.control.on_view_change = self.regroup
        self.guests = 0  # the generation in which somebody is to be admitted
        self.attempt: Attempt = (0, 0)
        self.applied: list[tuple[Attempt, int]] = []  # of each step: the attempt, a checksum of the weights
        # by attempt and bucket, where a codec owes something: the gradient, and the codec's state before
        self.offered: dict[tuple[Attempt, int], tuple[Tensor, Any]] = {}
        self.owed: list[dict[int, Tensor]] = []  # after each step, by spec
        self.entered: dict[Attempt, Part] = {}  # averages of weights that it took part in, whatever became of them
        self.averages: list[tuple[Attempt, list[Tensor]]] = []  # those that were applied, and the weights afterwards
        self.collects = False  # what the others have updated: until it has all, its weights are of two steps
        self.end = ""

    def _exchange(self) -> Exchange:
        how = self.how
        if how.period:
            made = diloco.Exchange(how.period, OUTER_LR, OUTER_BETA)
            made.average = partial(self._average, made.average)  # type: ignore[method-assign]
            return made
        if how.serves:
            served = server.Exchange()
            served.average = partial(self._collect, served.average)  # type: ignore[method-assign]
            return served
        return ordered.Exchange() if how.virtual else allreduce.Exchange(how.forms)

    def _average(
        self, average: Average, weights: Sequence[Tensor], now: bool, state: bool = False
    ) -> Sequence[Target] | None:
        assert isinstance(self.exchange, diloco.Exchange)
        part = Part([weight.clone() for weight in weights], self.exchange.samples, self.control.size)
        if self.exchange.step % self.how.period == 0 or now:
            self.entered[self.now()] = part
        return average(weights, now)

    def _collect(
        self, collect: Average, weights: Sequence[Tensor], now: bool, state: bool = False
    ) -> Sequence[Target] | None:
        self.collects = True
        found = collect(weights, now, state)
        self.collects = found is not None
        return found

    def averaged(self) -> None:
        self.collects = False
        if self.how.period:
            newest = max(self.entered)
            self.averages.append((newest, [weight.clone() for weight in self.engine.weights]))

    def __len__(self) -> int:
        return self.size

    @property
    def _memory(self) -> dict[int, Any]:
        """The codec's, by bucket."""
        assert isinstance(self.exchange, allreduce.Exchange)
        return self.exchange.memory

    @property
    def finished(self) -> bool:
        return self.end == "finished"

    def now(self) -> Attempt:
        return self.run.num_steps, self.net.hub_of[self.id].number

    def fetch(self, indices: Sequence[int], epoch: int) -> Any:
        self.takes(0, self.run.num_steps, indices)
        return self.x[indices], self.y[indices]

    def takes(self, process: int, step: int, indices: Sequence[int]) -> None:
        attempt = step, self.net.hub_of[self.id].number
        parts = self._parts.setdefault(attempt, {})
        parts[process] = indices
        self.taken[attempt] = [index for part in parts.values() for index in part]

    def offers(self, gradient: Gradient) -> None:
        if not self.how.owes:
            return
        if gradient.output_grad is not None and gradient.layer_input is not None:
            flat = (gradient.output_grad.T @ gradient.layer_input).reshape(-1)
        else:
            assert gradient.flat is not None
            flat = gradient.flat.clone()  # the exchange adds into it
        index = gradient.bucket.index
        self.offered[self.attempt, index] = flat, self._memory[index]

    def regroup(self, news: ViewChange) -> None:
        regroup(self.run, news)
        if self.hall:
            self.hall.joined = news.joined

    # where nodes return

    def _before(self, joiners: int) -> None:
        """As `admission.Admission.before`. ``guests``: the generation in which somebody is to be admitted, by the last
        vote."""
        assert self.hall
        if joiners > self.control.generation:
            self.hall.admit()
        self.hall.hold()
        self.guests = self.hall.next()

    def state(self) -> Tensor:
        return pack(self.model, self.kit.optimizer, self.run.num_steps)

    def load(self, state: Tensor) -> None:
        self.run.num_steps = unpack(state, self.model, self.kit.optimizer)

    def _enter(self) -> bool:
        """As `joiner.Joiner`. False where there is nothing to come to."""
        assert isinstance(self.members, Coming)
        if not self.members.admitted():
            self.end = "over"
            return False
        self.control.enter()
        link = self.members.link
        state = torch.empty_like(self.state())
        link.lane("state").recv(state, 0).wait()
        self.load(state)
        self.run.assignment = Assignment(link.rank, link.size)
        self.run.world = LaunchEnvironment(node=link.rank, num_nodes=link.size)
        self.run.limits = Limits((1,) * link.size, (BATCH,) * link.size)
        assert self.launcher
        self.launcher.holding.add(self.id)
        self.net.tell(f"      rank {self.id} has the state after {self.run.num_steps} steps")
        return True

    def part(self) -> None:
        """Nobody leaves before all know what became of the last step, which one alone may have been told."""
        self.control.all_gather(b"")

    def train(self) -> None:
        torch.set_num_threads(self.engine.num_threads)  # a thread has its own number, and the bits depend on it
        try:
            if not isinstance(self.members, Coming) or self._enter():
                self._train()
        except LinkError as error:
            self.end = f"ended: {error}"
        self.net.tell(f"      rank {self.id} {self.end}")
        self.exchange.close()
        self.members.link.close()
        if self.mesh:
            self.mesh.close(0)
        if self.end.startswith("ended"):
            self.net.lost(self.id)

    def _train(self) -> None:
        steps, joiners = windows(self.size), 0
        for number in range(self.run.num_steps, len(steps)):
            if self.hall:
                self._before(joiners)
            batch = batches.Batch(self, steps[number], 0, number, len(steps), number == len(steps) - 1)
            joiners = step(self.run, batch).vote.join_generation
            self._note()
        self.part()
        self.end = "finished"

    def _note(self) -> None:
        self.applied.append((self.attempt, self.checksum()))
        if self.how.owes:
            self.owed.append({index: self._residual(memory[0], index) for index, memory in self._memory.items()})
        step, number = self.attempt
        self.net.tell(f"      rank {self.id} has applied step {step} of generation {number}")
        if self.launcher and self.control.rank == 0:
            self.launcher.keep(self.run.num_steps, self.state)

    def checksum(self) -> int:
        return checksum(self.model)

    def _residual(self, kept: Tensor | None, index: int) -> Tensor:
        return torch.zeros(self.engine.buckets[index].numel, dtype=torch.float64) if kept is None else kept
