"""One simulated training: how many ranks, what strikes at which message, and whether the result is right.

All is real but the network and the time: engine, exchange, loop and data are those of any training. The first fault of
a seed strikes at each message in turn with each kind, so that many seeds leave none out; up to two more by chance.

    no torn step       every weight is that of a whole number of applied steps, bit for bit, also where training ended
    every sample once  the rows behind each applied step are those of its global batch
    no deadlock        whoever is alive at the end has trained to the end, or was told that others went on without it
    replicas equal     bit for bit, after every step
    the same result    as plain PyTorch on whole batches, in float64, to 1e-9; where it is reproducible, the bits of one
                       rank alone
"""

from __future__ import annotations

import copy
import random
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import seating
from paceline.codec.none import Codec
from paceline.contract import Link, LinkError, Regroup
from paceline.data import feed, order
from paceline.data.order import Seat
from paceline.elastic.survive import Surviving
from paceline.engine import sequential, virtual
from paceline.exchange import allreduce, tree
from paceline.link import memory
from paceline.link.faults import KINDS, Net
from paceline.loop import Loop
from paceline.report.record import Record

SIZES = (2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8)
BATCH, STEPS, SEED = 12, 3, 3
REPRODUCIBLE, SHARES = 0.15, 8  # of all schedules
IN, MIDDLE, WIDE, OUT = 6, 64, 128, 3  # MIDDLE x WIDE in float64 is large enough to travel as factors
LONGEST_S = 1000.0  # of virtual time
CLOSE = 1e-9


@dataclass(frozen=True)
class Schedule:
    """``faults``: by the number of the message, which kind. ``reproducible``: in virtual shares."""

    seed: int
    size: int
    faults: Mapping[int, str]
    reproducible: bool = False

    @classmethod
    def of(cls, seed: int) -> Schedule:
        dice = random.Random(f"schedule {seed}")
        size = dice.choice(SIZES)
        # of an undisturbed run: two pieces and a vote in each step, and one to end with
        expected = size * (3 * STEPS + 1)
        faults = {seed // len(KINDS) % expected: KINDS[seed % len(KINDS)]}
        for _ in range(dice.choice((0, 0, 1, 1, 2))):
            faults.setdefault(dice.randrange(2 * expected), dice.choice(KINDS))
        return cls(seed, size, faults, dice.random() < REPRODUCIBLE)

    def __str__(self) -> str:
        what = ", ".join(f"{kind} at message {number}" for number, kind in sorted(self.faults.items()))
        how = ", reproducible" if self.reproducible else ""
        return f"seed {self.seed}: {self.size} ranks{how}; {what or 'no fault'}"


@dataclass
class Outcome:
    """``fired``: how often each class of fault had its effect. ``violations``: none, if all is well."""

    schedule: Schedule
    fired: Counter[str]
    violations: list[str]
    history: list[str] = field(repr=False, default_factory=list)
    num_messages: int = 0
    num_meetings: int = 0
    left_out: int = 0  # ranks without which others went on though they were alive


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(IN, MIDDLE), nn.Linear(MIDDLE, WIDE), nn.Linear(WIDE, OUT)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


@cache
def _given() -> tuple[nn.Module, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(SEED)
    model = Model().double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=dice, dtype=torch.float64) * 0.2)
    x = torch.randn(BATCH * STEPS, IN, generator=dice, dtype=torch.float64)
    return model, x, torch.randint(0, OUT, (BATCH * STEPS,), generator=dice)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def windows() -> list[list[int]]:
    """The samples of each step's global batch."""
    turns = order.permutation(SEED, 0, BATCH * STEPS)
    return [order.window(turns, step, BATCH).tolist() for step in range(STEPS)]


@cache
def reference() -> list[Tensor]:
    """The weights after all steps, by plain PyTorch."""
    model, x, y = _given()
    model = copy.deepcopy(model)
    optimizer = _optimizer(model)
    for rows in windows():
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [weight.detach().clone() for weight in model.parameters()]


class Rank:
    """One rank's training, and what it will be asked about. It is its own source of samples."""

    def __init__(self, link: Link, net: Net, reproducible: bool):
        model, self.x, self.y = _given()
        self.net, self.id = net, link.rank
        self.model = copy.deepcopy(model)
        self.engine: sequential.Engine = virtual.Engine(SHARES, 1) if reproducible else sequential.Engine()
        inner = tree.Exchange() if reproducible else allreduce.Exchange("bytes")
        self.exchange = Surviving(inner, self.engine.relink)
        self.engine.open(self.model, _optimizer(self.model), F.cross_entropy)
        self.exchange.open(self.engine.specs, link, Codec(), -(-BATCH // link.size), absorbs=self.engine.absorbs)
        seat = Seat(link.rank, link.size, virtual=self.engine.num_shares)
        self.loop = Loop(self.engine, self.exchange, seat, Record(), who=f"rank {self.id}")
        self.limits = seating.Limits((1,) * link.size, (BATCH,) * link.size)
        self.exchange.rows = lambda: self.loop.seat.dealt(BATCH)[self.loop.seat.node]
        self.exchange.regrouped, self.exchange.begun = self.regroup, True
        self.attempt = (0, 0)  # step, generation
        self.taken: dict[tuple[int, int], list[int]] = {}
        self.applied: list[tuple[tuple[int, int], int]] = []  # of each step: the attempt, a checksum of the weights
        self.end = ""
        self.place, self.engine.place = self.engine.place, self.placed  # type: ignore[method-assign]

    def __len__(self) -> int:
        return len(self.x)

    def placed(self, seat: Seat, step: int) -> None:
        self.attempt = step, self.exchange.link.generation
        self.place(seat, step)

    def fetch(self, indices: Sequence[int], epoch: int) -> Any:
        self.taken[self.loop.num_steps, self.exchange.link.generation] = list(indices)
        return self.x[indices], self.y[indices]

    def regroup(self, news: Regroup) -> None:
        self.loop.seat, _, self.limits = seating.regroup(self.loop.seat, None, BATCH, self.limits, news)

    def part(self) -> None:
        """Nobody leaves before all know what became of the last step, which one alone may have been told."""
        self.exchange.gather(b"")

    def train(self) -> None:
        try:
            for batch in feed.batches(self, BATCH, 1, SEED, lambda: self.loop.seat, ahead=0):
                self.loop.step(batch)
                self.applied.append((self.attempt, self.checksum()))
                step, generation = self.attempt
                self.net.tell(f"      rank {self.id} has applied step {step} of generation {generation}")
            self.part()
            self.end = "finished"
        except LinkError as error:
            self.end = f"ended: {error}"
        self.net.tell(f"      rank {self.id} {self.end}")
        self.exchange.close()
        self.exchange.link.close()

    def checksum(self) -> int:
        return checksum(self.model)


def checksum(model: nn.Module) -> int:
    check = 0
    for weight in model.parameters():
        check = zlib.crc32(weight.detach().numpy().data, check)
    return check


@cache
def alone() -> int:
    """The checksum of reproducible weights after all steps, by one rank."""
    net = Net(0, {})
    done: list[Rank] = []

    def train() -> None:
        done.append(Rank(net.links(1)[0], net, reproducible=True))
        done[0].train()

    net.start(0, train)
    net.run()
    return done[0].checksum()


def play(schedule: Schedule) -> Outcome:
    net = Net(schedule.seed, schedule.faults)
    links = net.links(schedule.size)
    ranks: list[Rank] = []

    def begin(link: memory.Link) -> None:
        rank = Rank(link, net, schedule.reproducible)
        ranks.append(rank)
        rank.train()

    for link in links:
        net.start(link.rank, partial(begin, link))
    failed = []
    try:
        net.run()
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}")
    ranks.sort(key=lambda rank: rank.id)
    hubs: list[memory.Hub] = [links[0].hub]
    while hubs[-1].next:
        hubs.append(hubs[-1].next)
    found = failed or violations(schedule, net, ranks, hubs[-1].ids)
    left_out = sum(rank.end.startswith("ended") for rank in ranks)
    return Outcome(schedule, net.fired, found, net.history, net.num_messages, len(hubs) - 1, left_out)


def violations(schedule: Schedule, net: Net, ranks: Sequence[Rank], last: Sequence[int]) -> list[str]:
    """What is wrong. ``last``: the ranks of the last generation."""
    found = [net.stuck] if net.stuck else []
    if net.clock > LONGEST_S:
        found.append(f"it took {net.clock:.0f} s of virtual time")
    start = checksum(_given()[0])
    finished = [rank for rank in ranks if rank.end == "finished"]
    for rank in ranks:
        steps = [step for (step, _), _ in rank.applied]
        if steps != list(range(len(steps))):
            found.append(f"rank {rank.id} applied steps {steps}")
        if rank.id in net.dead:
            continue
        if rank.checksum() != (rank.applied[-1][1] if steps else start):
            found.append(f"rank {rank.id} has weights of no whole number of steps: a torn step")
        if rank.end and rank.id in last and (rank.end != "finished" or len(steps) != STEPS):
            found.append(f"rank {rank.id} is alive and {rank.end} after {len(steps)} of {STEPS} steps")
        if not rank.end:
            found.append(f"rank {rank.id} is alive and silent after {len(steps)} of {STEPS} steps")
    for step in range(STEPS):
        # whoever was lost may have applied its last step alone: nobody else will ever know, nor add up in its order
        sure = [rank for rank in ranks if len(rank.applied) > step + (rank not in finished)]
        anyone = [rank for rank in ranks if len(rank.applied) > step]
        checks = {rank.applied[step][1] for rank in (anyone if schedule.reproducible else sure)}
        if len(checks) > 1 or len({rank.applied[step][0] for rank in sure}) > 1:
            said = {rank.id: rank.applied[step] for rank in anyone}
            found.append(f"replicas differ after step {step}: {said}")
        if finished and len(finished[0].applied) > step:
            attempt = finished[0].applied[step][0]
            rows = sorted(row for rank in ranks for row in rank.taken.get(attempt, ()))
            if rows != sorted(windows()[step]):
                found.append(f"step {step} used samples {rows}, its global batch is {sorted(windows()[step])}")
    for rank in finished:
        pairs = zip(rank.model.parameters(), reference(), strict=True)
        gap = max(float((weight.detach() - want).norm() / want.norm()) for weight, want in pairs)
        if not gap <= CLOSE:
            found.append(f"rank {rank.id} is {gap:.2g} from the undisturbed run")
        if schedule.reproducible and rank.checksum() != alone():
            found.append(f"rank {rank.id} has other bits than one rank alone")
    return found
