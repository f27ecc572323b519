"""Laws of an exchange: N ranks equal one process on the global batch; a refused or restored step leaves no trace."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import registry
from paceline.contract import Exchange, GlobalBatch, Share
from paceline.data.sampler import Assignment
from paceline.environment import LaunchEnvironment
from paceline.errors import LinkError
from paceline.exchange.flow.control import Control
from paceline.job import Job
from paceline.messages import Vote
from paceline.step.average import average
from paceline.step.run_state import RunState
from paceline.step.step import step
from paceline.testing.law import Law
from paceline.transport import Link

Make = Callable[[], Exchange]
State = dict[str, Tensor]
EXACT = 1e-12  # float64, a few steps: only the order of additions differs
DEADLINE_S = 90.0
BATCH, WIDTH, CLASSES = 24, 33, 3
SIZES = 1, 2, 3, 5


class Whole(GlobalBatch):
    """A global batch as tensors, of which each rank takes its rows."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        self.weight = float(BATCH)

    def share(self, assignment: Share) -> Any:
        rows = assignment.rows(BATCH)
        return (self.x[rows.start : rows.stop], self.y[rows.start : rows.stop]) if rows else None


BATCHES = [Whole(seed) for seed in range(5)]


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    made = nn.Sequential(nn.Linear(WIDTH, 65), nn.ReLU(), nn.Linear(65, CLASSES)).double()
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.2)
    return made


def optimizer(made: nn.Module, momentum: float) -> torch.optim.SGD:
    return torch.optim.SGD(made.parameters(), lr=0.1, momentum=momentum)


def alone(momentum: float = 0.9) -> State:
    """Plain PyTorch on the whole batch."""
    made = model()
    sgd = optimizer(made, momentum)
    for batch in BATCHES:
        sgd.zero_grad()
        F.cross_entropy(made(batch.x), batch.y).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    return made.state_dict()


class Rank:
    """One rank over a link. ``refuses``: the steps that it votes down once."""

    def __init__(self, link: Link, exchange: Exchange, momentum: float = 0.9, refuses: Sequence[int] = ()):
        self.model, engine = model(), registry.find("engine", registry.BASELINE)
        sgd = optimizer(self.model, momentum)
        engine.divided = link.size > 1
        engine.open(self.model, sgd, F.cross_entropy)
        codec = registry.find("codec", registry.CODEC)
        exchange.open(engine, link, codec, -(-BATCH // link.size))
        members = registry.module("link", registry.ALONE).Members(link)
        control = Control(members, votes=exchange.consensus == "step")
        job, world = (
            Job(self.model, sgd, F.cross_entropy, BATCH),
            LaunchEnvironment(node=link.rank, num_nodes=link.size),
        )
        assignment = Assignment(link.rank, link.size)
        self.run = RunState(job, world, engine, exchange, control, codec, members, assignment)
        self.exchange, self._refuses, self._collect = exchange, list(refuses), exchange.collect
        exchange.collect = self._vote  # type: ignore[method-assign]

    def _vote(self, vote: Vote) -> Vote:
        if self.run.num_steps in self._refuses:
            self._refuses.remove(self.run.num_steps)
            vote.ok = False
        return self._collect(vote)

    def train(self, batches: Sequence[Whole] = BATCHES) -> State:
        for batch in batches:
            step(self.run, batch)
        average(self.run)
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def on_ranks(size: int, work: Callable[[Link], State]) -> list[State]:
    """What ``work`` returns on each of so many ranks, which are threads."""
    links = registry.module("link", registry.ALONE).world(size)
    found: list[State] = [{} for _ in links]
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            found[rank] = work(links[rank])
        except BaseException as error:
            errors.append(error)
            links[rank].hub.kill(rank)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if errors:
        raise next((error for error in errors if not isinstance(error, LinkError)), errors[0])
    assert not any(thread.is_alive() for thread in threads), f"a rank still runs after {DEADLINE_S:.0f} s"
    return found


def gap(one: State, other: State) -> float:
    """The largest difference of a parameter, relative to its norm."""
    return max(float((one[name] - want).norm() / want.norm()) for name, want in other.items())


def ranks_equal_one_process(make: Make, size: int) -> None:
    """If replicas are equal after each step; else one rank does, and all have the same weights after an average."""
    found = on_ranks(size, lambda link: Rank(link, make()).train())
    if make().consensus == "step" or size == 1:
        assert gap(found[0], alone()) < EXACT
    for state in found:
        assert all(torch.equal(value, state[name]) for name, value in found[0].items()), "replicas differ"
    assert gap(found[0], model().state_dict()) > 1e-3, "nothing was trained"


def refused_steps_leave_no_trace(make: Make, size: int) -> None:
    """The last rank votes three steps down; with its own steps only, no other rank is asked."""
    plain = on_ranks(size, lambda link: Rank(link, make()).train())
    refuses = (0, 2, 3) if make().consensus == "step" else ()
    last = on_ranks(
        size, lambda link: Rank(link, make(), refuses=refuses if link.rank == link.size - 1 else ()).train()
    )
    # the first refused step may be sent in another form, whose sum has other last bits
    assert all(gap(one, other) < EXACT for one, other in zip(plain, last, strict=True))


def a_restored_state_continues_as_if_it_had_not_been(make: Make, size: int) -> None:
    def work(link: Link, middle: bool) -> State:
        rank = Rank(link, make(), momentum=0.0)
        weights = rank.train(BATCHES[:2])
        if middle:
            kept = copy.deepcopy(rank.exchange.state())
            rank.exchange.close()
            rank = Rank(link, make(), momentum=0.0)
            rank.model.load_state_dict(weights)
            rank.exchange.load(kept)
        return rank.train(BATCHES[2:])

    plain, restored = (on_ranks(size, functools.partial(work, middle=middle)) for middle in (False, True))
    for one, other in zip(plain, restored, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def laws() -> list[Law]:
    return list(_laws())


def _laws() -> Iterator[Law]:
    for check in (
        ranks_equal_one_process,
        refused_steps_leave_no_trace,
        a_restored_state_continues_as_if_it_had_not_been,
    ):
        for size in SIZES:
            yield Law(check, {"size": size}, (str(size),))
