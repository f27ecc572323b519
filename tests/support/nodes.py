"""Small models, plain-PyTorch references, and a rank as the tests build it: engine + exchange + loop."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from device import DEVICE
from paceline import contract, messages, transport
from paceline.contract import Exchange, GlobalBatch
from paceline.data.sampler import Assignment
from paceline.engine.sequential import Engine
from paceline.environment import LaunchEnvironment
from paceline.exchange.flow.control import Control
from paceline.job import Job
from paceline.link.memory import Members
from paceline.registry import parse
from paceline.report import step_observer
from paceline.report.record import Record
from paceline.report.step_record import StepRecord
from paceline.step.forward_state_sync import ForwardStateSync
from paceline.step.rebalance import Rebalance
from paceline.step.run_state import RunState
from paceline.step.step import step
from paceline.train.lars import LARS
from paceline.transport import Link
from partly import partly

IN, HIDDEN, OUT = 96, 128, 3  # 96 x 128 in float64 is large enough to travel as factors
WIDE = 256


class Plain(nn.Module):
    """Two layers that may travel as factors, and one that is too small to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(IN, HIDDEN),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, OUT),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))))


class Wide(Plain):
    """Large enough in float32, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(IN, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, OUT)


class Conv(nn.Module):
    """Convolutions, batch normalisation and dropout before a large layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.fc, self.head = nn.Dropout(0.3), nn.Linear(8 * IN, HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x.view(len(x), 1, 8, IN // 8))))
        return self.head(F.relu(self.fc(self.drop(x.flatten(1)))))


class Tied(Plain):
    """One weight in two modules, and one used outside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(HIDDEN, HIDDEN)
        self.again.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.again(F.relu(self.second(F.relu(self.first(x))))))
        return self.head(x) + 0.1 * F.linear(x[:, :IN], self.first.weight)[:, :OUT]


class Twice(Plain):
    """One layer called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.second(F.relu(self.first(x)))))))


class Repeated(Plain):
    """Five rows per sample: each process's factors fit in the gradient's place, everyone's do not."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = torch.stack([x.roll(i, 1) for i in range(5)], 1)
        return self.head(F.relu(self.second(F.relu(self.first(shifted))))).mean(1)


class Sometimes(Plain):
    """A branch that only some rows take: on a rank with none of them its layers get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.rare_small = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.never = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        marked = x[:, 0] > 1.0
        h = F.relu(self.second(F.relu(self.first(x))))
        out = self.head(h)
        if marked.any():
            out = out + marked[:, None] * self.rare_small(F.relu(self.rare(h)))
        return out


class Normed(nn.Module):
    """Batch normalisation, and nothing random."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(IN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.first(x))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "tied": Tied,
    "twice": Twice,
    "repeated": Repeated,
    "sometimes": Sometimes,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "lars": lambda p: LARS(p, lr=1.0, trust=0.05, weight_decay=0.01),
    "last": lambda p: torch.optim.SGD(list(p)[-2:], lr=0.1, momentum=0.9),  # all others ask for a gradient, too
}


def engine_of(buckets: Sequence[messages.Bucket], **traits: Any) -> contract.Engine:
    """What an exchange needs to know of an engine."""
    made = partly(contract.Engine)()
    vars(made).update(buckets=buckets, **traits)
    return made


ONE_AT_A_TIME = threading.Lock()


def build(kind: Callable[[], nn.Module] = Plain, dtype: torch.dtype = torch.float64) -> nn.Module:
    with ONE_AT_A_TIME:  # ranks are threads, and draw from one generator
        while True:
            one, other = _seeded(kind), _seeded(kind)  # unlike where a rank that trains already has drawn meanwhile
            if all(map(torch.equal, one.state_dict().values(), other.state_dict().values())):
                return one.to(DEVICE, dtype)


def _seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return kind()


def rows(count: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(count, IN, generator=dice, dtype=dtype)
    return x.to(DEVICE), torch.randint(0, OUT, (count,), generator=dice).to(DEVICE)


class Whole(GlobalBatch):
    """A global batch as the loop knows it."""

    def __init__(self, data: Sequence[Tensor]):
        self.data, self.weight = data, float(len(data[0]))

    def share(self, assignment: Assignment) -> Any:
        mine = assignment.rows(len(self.data[0]))
        return tuple(part[mine.start : mine.stop] for part in self.data) if mine else None


class Rejoins(step_observer.StepObserver):
    """Before a step is computed again, ``rejoin`` is called."""

    def __init__(self, run: RunState, rejoin: Callable[[RunState], None]):
        self.run, self.rejoin = run, rejoin

    def again(self, step: int, outcome: messages.StepOutcome) -> None:
        self.rejoin(self.run)


class Rank:
    """One rank over a link, with everything that a test may want to look at."""

    def __init__(
        self,
        link: Link,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["momentum"],
        exchange: str | Exchange = "allreduce",
        codec: str = "none",
        clip: float | None = None,
        shares: tuple[float, ...] | None = None,
        loss: Callable[..., Any] = F.cross_entropy,
        rejoin: Callable[[RunState], None] = lambda run: None,
        batch: int = 24,
        engine: contract.Engine | None = None,
        batch_norm: str = "local",
        buffers: str = "own",
        record: Record | None = None,
        members: transport.Membership | None = None,
        control: transport.Control | None = None,
    ):
        self.model = copy.deepcopy(model)
        self.optimizer = optimizer(self.model.parameters())
        self.engine = engine or Engine()
        self.engine.divided = link.size > 1
        self.engine.open(self.model, self.optimizer, loss)
        self.exchange = parse("exchange", exchange) if isinstance(exchange, str) else exchange
        made = parse("codec", codec)
        self.exchange.open(self.engine, link, made, -(-batch // link.size))
        if batch_norm == "sync":
            self.engine.sync_norm(link)
        assignment = Assignment(link.rank, link.size, shares=shares)
        job = Job(self.model, self.optimizer, loss, batch, clip)
        world = LaunchEnvironment(node=link.rank, num_nodes=link.size)
        who = f"rank {link.rank}"
        record = record or Record()
        self.members = members or Members(link)
        self.control = control or Control(self.members, self.exchange.consensus == "step")
        kept = self.control, made, self.members
        self.run = RunState(
            job, world, self.engine, self.exchange, *kept, assignment, identity=who, clip=clip, record=record
        )
        self.run.leader = not link.rank
        self.run.observers = [StepRecord(record, self.engine, self.exchange, self.control), Rejoins(self.run, rejoin)]
        if self.exchange.consensus == "step":
            answered = self.engine.answered if batch_norm == "sync" else None
            passes = self.engine.accumulate
            self.moved = ForwardStateSync(self.run, self.engine.moving, buffers == "broadcast", answered, passes)
            self.run.observers.append(self.moved)
        self.run.observers.append(Rebalance(self.run))

    def step(self, batch: Any) -> messages.StepOutcome:
        return step(self.run, batch)

    def train(self, batches: Sequence[Sequence[Tensor]]) -> list[float]:
        losses = []
        for data in batches:
            vote = self.step(Whole(data)).vote
            losses.append(vote.loss_sum / vote.weight)
        return losses

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def reference(
    model: nn.Module,
    batches: Sequence[Sequence[Tensor]],
    optimizer: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["momentum"],
    clip: float | None = None,
    loss: Callable[..., Any] = F.cross_entropy,
) -> tuple[dict[str, Tensor], list[float]]:
    """Plain PyTorch, one process, the whole batch: (weights, losses)."""
    model = copy.deepcopy(model)
    stepper, losses = optimizer(model.parameters()), []
    device = next(model.parameters()).device
    for batch in batches:
        *inputs, target = (part.to(device) for part in batch)
        model.zero_grad()  # also what the optimizer does not hold
        value = loss(model(*inputs), target)
        if isinstance(value, tuple):
            value = value[0] / value[1]
        value.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert norm > clip, "the clip must be active for the test to mean anything"
        stepper.step()
        losses.append(float(value.detach()))
    return model.state_dict(), losses


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any parameter, relative to its norm."""
    assert one.keys() == other.keys()
    pairs = [(one[name], other[name]) for name in one if other[name].is_floating_point()]
    return max(float((a.to(b.device) - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)
