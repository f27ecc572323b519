"""How a simulated training trains: model, engine, forms, codec, shares; and what plain PyTorch makes of the same.

Opened engines are kept for the next training: opening one takes longer than some steps.
"""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.codec import feedback, half, lowrank, none, qsgd, topk
from paceline.contract import Codec
from paceline.data import sampler
from paceline.data.load_balance import LoadBalancer, Reassignment
from paceline.engine import pipeline, reproducible, sequential
from paceline.job import Job
from paceline_bench.simulated.node import Engine, Mesh

BATCH, SEED, LR = 12, 3, 0.1
SAMPLES = (24, 31, 36)  # of a training: two steps, three of which the last is short, and three
SHARES = 6  # virtual ones: of seven ranks one has none
IN, OUT = 64, 128  # so many numbers in float64 are large enough to travel as factors
CLOSE, ROUNDED = 1e-9, 0.02  # to plain PyTorch, relative to the way gone: exact mathematics, and sums in 16 bits
QUANTISED = 0.4  # likewise, sums of eight bits, of which each of eight ranks has fifteen levels
ANYHOW = float("inf")  # what a codec owes comes later: another law holds
CLIP = 0.1
APART = 1e-13  # what two unlike processors may make of one number
QUIET = 2  # steps in which weights that have differed go round


@dataclass(frozen=True)
class Way:
    """``share``: of all schedules, in proportion."""

    share: int
    forms: str = "bytes"
    codec: Callable[[], Codec] = none.Codec
    collectives: int = 2  # of both buckets in a step
    momentum: float = 0.9
    accumulate: int = 1
    uneven: bool = False  # nodes have unlike shares, which move after every step
    drifts: bool = False  # the last rank begins with other last bits
    virtual: bool = False  # shares that the batch is always dealt in
    close: float = CLOSE
    normed: bool = False  # batch norm over all, and clipped
    period: int = 0  # steps between two averages of weights that each node trains alone; 0: none
    serves: bool = False  # each node updates a part of the weights
    stages: int = 1  # of a process's pipeline
    processes: int = 1  # of a node

    @property
    def owes(self) -> bool:
        """Whether its codec sends later what it has left out."""
        return self.close == ANYHOW and not self.period

    def num_messages(self, size: int, steps: int) -> int:
        """Of an undisturbed training: gradients, a vote and that all know it in each step, and one to end with."""
        if self.period:  # who has how many samples, both buckets, a vote and that all know it; one to end with
            return size * ((self.collectives + 3) * -(-steps // self.period) + 1)
        if self.serves:  # the new weights of both buckets, a vote and that all know it
            return size * ((self.collectives + 6) * steps + 1)
        spreads = min(steps, QUIET) * (1 + 2 * size) if self.drifts else 0
        return size * ((self.collectives + 2) * steps + 1) + spreads


WAYS = {
    "factors": Way(6),
    "dense": Way(2, forms="dense"),
    "accumulated": Way(2, accumulate=3),
    "uneven": Way(3, uneven=True, accumulate=2),
    "drifting": Way(2, drifts=True),
    "half": Way(2, codec=half.Codec, close=ROUNDED),
    "topk": Way(3, forms="dense", codec=lambda: feedback.Codec(topk.Codec(0.2)), momentum=0.0, close=ANYHOW),
    "lowrank": Way(
        3,
        forms="dense",
        codec=lambda: feedback.Codec(lowrank.Codec(2)),
        collectives=3,
        momentum=0.0,
        close=ANYHOW,
    ),
    "qsgd": Way(2, forms="dense", codec=qsgd.Codec, collectives=4, close=QUANTISED),
    "reproducible": Way(2, virtual=True),
    "pipeline": Way(1, stages=2),
    "hybrid": Way(1, stages=2, processes=2),
    "diloco": Way(3, period=2, close=ANYHOW),
    "server": Way(3, collectives=4, serves=True),  # a sum of each bucket, and its copy
}


WAITING = {"normed": Way(1, normed=True), "normed, dense": Way(1, forms="dense", normed=True)}  # where nodes return


@cache
def given(normed: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
    """(the model that all begin with, inputs, targets)."""
    dice = torch.Generator().manual_seed(SEED)
    model: nn.Module = nn.Linear(IN, OUT).double()
    if normed:
        model = nn.Sequential(model, nn.BatchNorm1d(OUT).double())
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=dice, dtype=torch.float64) * 0.2)
    x = torch.randn(max(SAMPLES), IN, generator=dice, dtype=torch.float64)
    return model, x, torch.randint(0, OUT, (max(SAMPLES),), generator=dice)


def optimizer(model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    """Without momentum, without decay too: then what was applied can be read off the weights."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum, weight_decay=0.01 if momentum else 0.0)


@cache
def windows(samples: int) -> list[sampler.Indices]:
    """The samples of each step's global batch."""
    turns = sampler.permutation(SEED, 0, samples)
    return [sampler.window(turns, step, BATCH) for step in range(sampler.num_steps(samples, BATCH))]


@cache
def reference(momentum: float, samples: int, normed: bool = False) -> list[Tensor]:
    """The weights after all steps, by plain PyTorch."""
    model, x, y = given(normed)
    model = copy.deepcopy(model)
    stepper = optimizer(model, momentum)
    for rows in windows(samples):
        stepper.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        if normed:
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            assert norm > CLIP
        stepper.step()
    return [weight.detach().clone() for weight in model.parameters()]


def checksum(model: nn.Module) -> int:
    return crc(model.parameters())


def crc(weights: Iterable[Tensor]) -> int:
    check = 0
    for weight in weights:
        check = zlib.crc32(weight.detach().numpy().data, check)
    return check


class Kit:
    """A model with its optimizer and an engine that is open. ``mesh``: of the processes of its node."""

    def __init__(self, way: Way, mesh: Mesh | None = None, rank: int = 0):
        self.way, self.model = way, copy.deepcopy(given(way.normed)[0])
        self.optimizer = optimizer(self.model, way.momentum)
        self.engine: sequential.Engine = reproducible.Engine(SHARES, 1) if way.virtual else sequential.Engine()
        if way.stages > 1:
            self.model = nn.Sequential(self.model, *(nn.Identity() for _ in range(way.stages - 1)))
            cuts = ";".join(str(stage) for stage in range(1, way.stages))
            self.engine = pipeline.Engine(way.stages, micros=way.stages, cut=cuts)
        if mesh:
            self.engine = Engine(rank, mesh, self.engine)
            self.engine.divided = True
        self.job = Job(self.model, self.optimizer, None, BATCH)
        self.engine.accumulate = way.accumulate
        self.engine.open(self.model, self.optimizer, F.cross_entropy)

    def renew(self) -> None:
        """As it was in the beginning, whatever became of the training before."""
        with torch.no_grad():
            for weight, start in zip(self.model.parameters(), given(self.way.normed)[0].parameters(), strict=True):
                weight.copy_(start)
                weight.grad = None
        if self.engine._divided:
            self.engine._divided.assemble({})
        self.optimizer.state.clear()
        self.engine._step_number = 0


_kits: defaultdict[Way, list[Kit]] = defaultdict(list)


def take(way: Way, mesh: Mesh | None = None, rank: int = 0) -> Kit:
    if way.normed or mesh:
        return Kit(way, mesh, rank)  # whose batch norm belongs to its link, or whose weights to its node
    kit = _kits[way].pop() if _kits[way] else Kit(way)
    kit.renew()
    return kit


def give_back(kits: Sequence[Kit]) -> None:
    for kit in kits:
        if kit.way.normed or kit.way.processes > 1:
            kit.engine.close()
        else:
            _kits[kit.way].append(kit)


class Restless(LoadBalancer):
    """Moves every share on by a node after each step, where nodes met and their speed can be known."""

    def after(self, rows: tuple[int, ...], paces: Sequence[tuple[float, float]]) -> Reassignment | None:
        if len(paces) != len(self.least) or sum(rows) < self.count or not all(rows) or len(set(rows)) == 1:
            return None
        return Reassignment(rows, (*rows[1:], rows[0]), (0.0,) * len(rows), 0.0, 0.0, "restless")
