"""One rank of a simulated training, and what it will be asked about: the engine, exchange, loop and data of any."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.contract import LinkError, Piece, Regroup
from paceline.data import batches
from paceline.data.sampler import Seat
from paceline.elastic import assignment
from paceline.elastic.fault_tolerant import Surviving
from paceline.elastic.replica_sync import Drift
from paceline.exchange import allreduce, tree
from paceline.link.memory import Link
from paceline.report.record import Record
from paceline.step import Loop
from paceline_bench.simulated.fault_link import Net
from paceline_bench.simulated.returns import Coming, Hall, Launcher, pack, unpack
from paceline_bench.simulated.scenarios import APART, BATCH, CLIP, QUIET, Restless, checksum, given, take, windows
from paceline_bench.simulated.schedule import Schedule

Attempt = tuple[int, int]  # at which step, of which generation


@cache
def shares(seed: int, size: int) -> tuple[float, ...]:
    """Of each node, some of them without any rows."""
    dice = random.Random(f"shares {seed}")
    drawn = tuple(float(dice.choice((0, 1, 1, 2, 2, 3))) for _ in range(size))
    return drawn if any(drawn) else (1.0,) * size


class Noted(Surviving):
    """Tells its rank what begins, and what is offered."""

    rank: Rank

    def before(self) -> None:
        self.rank.attempt = self.rank.now()
        super().before()

    def offer(self, piece: Piece) -> None:
        self.rank.offers(piece)
        super().offer(piece)


class Rank:
    """It is its own source of samples. ``codec``: its memory moves with each applied step."""

    def __init__(self, link: Link, net: Net, schedule: Schedule, launcher: Launcher | None = None):
        how = schedule.how
        _, self.x, self.y = given(how.normed)
        self.net, self.how, self.size = net, how, schedule.samples
        self.link, self.launcher = link, launcher
        self.id = link.who if isinstance(link, Coming) else link.rank
        self.kit = take(how)
        self.model, self.engine, self.codec = self.kit.model, self.kit.engine, how.codec()
        if how.drifts and link.rank == link.size - 1:
            self.engine.weights[0].view(-1)[0] *= 1 + APART
        self.start = self.checksum() if how.drifts else 0
        self.inner = tree.Exchange() if how.virtual else allreduce.Exchange(how.forms)
        self.exchange = Noted(self.inner, self.engine.relink)
        self.exchange.rank = self
        absorbs = self.engine.absorbs
        self.exchange.open(self.engine.specs, link, self.codec, -(-BATCH // link.size), absorbs=absorbs)
        dealt = shares(schedule.seed, link.size) if how.uneven else None
        seat = Seat(link.rank, link.size, shares=dealt, virtual=self.engine.num_shares)
        self.limits = assignment.Limits((1,) * link.size, (BATCH,) * link.size)
        record = Record()
        drift = Drift(self.engine, self.exchange, record, False, period=1, quiet=QUIET) if how.drifts else None
        self.loop = Loop(self.engine, self.exchange, seat, record, who=f"rank {self.id}", drift=drift)
        moves = how.uneven and not how.virtual
        self.loop.balance = Restless(BATCH, self.limits.least, self.limits.most) if moves else None
        if how.normed:
            self.engine.sync_norm(link)
        self.hall = Hall(self, launcher, schedule.minimum, BATCH) if launcher else None
        if launcher:
            self.loop.clip, self.loop.rejoin = CLIP, self._rejoin
        self.exchange.rows = lambda: self.loop.seat.dealt(BATCH)[self.loop.seat.node]
        self.exchange.regrouped = self.regroup
        self.attempt: Attempt = (0, 0)
        self.taken: dict[Attempt, list[int]] = {}
        self.applied: list[tuple[Attempt, int]] = []  # of each step: the attempt, a checksum of the weights
        self.offered: dict[tuple[Attempt, int], Tensor] = {}  # by attempt and spec, where a codec owes something
        self.owed: list[dict[int, Tensor]] = []  # after each step, by spec
        self.end = ""

    def __len__(self) -> int:
        return self.size

    @property
    def finished(self) -> bool:
        return self.end == "finished"

    def now(self) -> Attempt:
        return self.loop.num_steps, self.net.hub_of[self.id].number

    def fetch(self, indices: Sequence[int], epoch: int) -> Any:
        self.taken[self.now()] = list(indices)
        return self.x[indices], self.y[indices]

    def offers(self, piece: Piece) -> None:
        if not self.how.owes:
            return
        if piece.left is not None and piece.right is not None:
            flat = (piece.left.T @ piece.right).reshape(-1)
        else:
            assert piece.flat is not None
            flat = piece.flat.clone()  # the exchange adds into it
        self.offered[self.attempt, piece.spec.index] = flat

    def regroup(self, news: Regroup) -> None:
        loop = self.loop
        loop.seat, balance, self.limits = assignment.regroup(loop.seat, loop.balance, BATCH, self.limits, news)
        loop.balance = Restless(BATCH, balance.least, balance.most) if balance else None
        if self.hall:
            self.hall.came = news.came

    # where nodes return

    def _rejoin(self, seat: Seat) -> Seat:
        assert self.hall
        self.hall.hold()
        moved: Seat = self.loop.seat
        return moved

    def _before(self, guests: int) -> None:
        """As `welcome.Welcome.before`. ``guests``: the generation in which somebody is to be admitted, by the last
        vote."""
        assert self.hall
        if guests > self.exchange.link.generation:
            self.hall.admit()
        self.hall.hold()
        self.loop.guests = self.hall.next()

    def state(self) -> Tensor:
        return pack(self.model, self.kit.optimizer, self.loop.num_steps)

    def load(self, state: Tensor) -> None:
        self.loop.num_steps = unpack(state, self.model, self.kit.optimizer)

    def _enter(self) -> bool:
        """As `entry.Entry`. False where there is nothing to come to."""
        assert isinstance(self.link, Coming)
        if not self.link.admitted():
            self.end = "over"
            return False
        self.exchange.enter()
        link = self.exchange.link
        state = torch.empty_like(self.state())
        link.lane("state").recv(state, 0).wait()
        self.load(state)
        self.loop.seat = Seat(link.rank, link.size)
        self.limits = assignment.Limits((1,) * link.size, (BATCH,) * link.size)
        assert self.launcher
        self.launcher.holding.add(self.id)
        self.net.tell(f"      rank {self.id} has the state after {self.loop.num_steps} steps")
        return True

    def part(self) -> None:
        """Nobody leaves before all know what became of the last step, which one alone may have been told."""
        self.exchange.gather(b"")

    def train(self) -> None:
        torch.set_num_threads(self.engine.num_threads)  # a thread has its own number, and the bits depend on it
        try:
            if not isinstance(self.link, Coming) or self._enter():
                self._train()
        except LinkError as error:
            self.end = f"ended: {error}"
        self.net.tell(f"      rank {self.id} {self.end}")
        self.exchange.close()
        self.exchange.link.close()
        if self.end.startswith("ended"):
            self.net.lost(self.id)

    def _train(self) -> None:
        steps, guests = windows(self.size), 0
        for step in range(self.loop.num_steps, len(steps)):
            if self.hall:
                self._before(guests)
            batch = batches.Batch(self, steps[step], 0, step, len(steps), step == len(steps) - 1)
            guests = self.loop.step(batch).ballot.guests
            self._note()
        self.part()
        self.end = "finished"

    def _note(self) -> None:
        self.applied.append((self.attempt, self.checksum()))
        if self.how.owes:
            self.owed.append({index: self._residual(memory[0], index) for index, memory in self.inner.memory.items()})
        step, number = self.attempt
        self.net.tell(f"      rank {self.id} has applied step {step} of generation {number}")
        if self.launcher and self.exchange.link.rank == 0:
            self.launcher.keep(self.loop.num_steps, self.state)

    def checksum(self) -> int:
        return checksum(self.model)

    def _residual(self, kept: Tensor | None, index: int) -> Tensor:
        return torch.zeros(self.engine.specs[index].numel, dtype=torch.float64) if kept is None else kept
