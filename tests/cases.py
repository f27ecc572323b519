"""Trainings as a user would write them, each beside the plain PyTorch loop that it must equal."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torch.utils.data import default_collate

import paceline

IN, HIDDEN, OUT, STEPS = 24, 128, 3, 4
Point = namedtuple("Point", "x y")


class Rows:
    """A map-style dataset: what ``item`` makes of the i-th input and label."""

    def __init__(self, count: int, item: Callable[[Tensor, Tensor], Any]):
        dice = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, IN, generator=dice, dtype=torch.float64)
        self.y = torch.randint(0, OUT, (count,), generator=dice)
        self.item = item

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.item(self.x[i], self.y[i])


class Net(nn.Module):
    """The middle layer is large enough to travel as factors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, OUT)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self.head(self.features(x))


class Sum(Net):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return super().forward(a + 2 * b)


class Nested(Net):
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return super().forward(inputs["a"] - inputs["b"])


class Coder(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, IN)


class OwnLoss(Net):
    """As the models of `transformers` do it."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = super().forward(x)
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(logits, y))


class OwnLossByName(OwnLoss):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return vars(super().forward(x, y))


class LossModule(nn.Module):
    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1])


def masked(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Class 0 does not count."""
    return F.cross_entropy(output, y.where(y > 0, -100), ignore_index=-100, reduction="sum"), (y > 0).sum()


def parts(output: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"entropy": F.cross_entropy(output, y), "size": 0.1 * output.square().mean(), "shift": output.mean()}


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


@dataclass
class Case:
    """``loss`` and ``options`` go to `join`; ``value(model, batch)`` is the same loss, as plain PyTorch has it."""

    model: Callable[[], nn.Module] = Net
    item: Callable[[Tensor, Tensor], Any] = lambda x, y: (x, y)
    loss: Callable[..., Any] | None = F.cross_entropy
    value: Callable[[nn.Module, Any], Tensor] = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.Adam(p, lr=0.01)
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters()
    alone: str = ""  # why it equals the plain loop on one process only

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(7)
        model = self.model().double()
        optimizer = self.optimizer(self.groups(model))
        return model, optimizer, self.scheduler(optimizer) if self.scheduler else None

    def train(self, rows: int, engine: str | None = None) -> dict[str, Any]:
        """By paceline. Weights, losses, learning rates, and what the exchange used."""
        model, optimizer, scheduler = self.build()
        torch.manual_seed(11)
        losses, rates, norms = [], [], []
        with paceline.join(
            model, optimizer, self.loss, batch_size=rows, scheduler=scheduler, engine=engine, **self.options
        ) as pace:
            for batch in pace.batches(Rows(rows * STEPS, self.item), shuffle=False):
                losses.append(pace.step(batch))
                rates.append(optimizer.param_groups[0]["lr"])
                norms.append(pace.grad_norm)
            facts = {"losses": losses, "rates": rates, "norms": norms, "terms": pace.terms}
            facts["forms"] = list(pace.exchange.forms())
            weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        return {"weights": weights, **facts}

    def plain(self, rows: int) -> dict[str, Any]:
        """By a loop in plain PyTorch over whole batches."""
        model, optimizer, scheduler = self.build()
        torch.manual_seed(11)
        data, losses, rates, norms = Rows(rows * STEPS, self.item), [], [], []
        for step in range(STEPS):
            batch = default_collate([data[i] for i in range(step * rows, (step + 1) * rows)])
            optimizer.zero_grad()
            loss = self.value(model, batch)
            loss.backward()
            norms.append(None)
            if "clip" in self.options:
                norms[-1] = float(nn.utils.clip_grad_norm_(model.parameters(), self.options["clip"]))
            optimizer.step()
            if scheduler:
                scheduler.step()
            losses.append(float(loss.detach()))
            rates.append(optimizer.param_groups[0]["lr"])
        return {"weights": model.state_dict(), "losses": losses, "rates": rates, "norms": norms}


def as_dict(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"x": x, "y": y}


def by_name(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


SHAPES = {
    "tuple": Case(),
    "list": Case(item=lambda x, y: [x, y]),
    "namedtuple": Case(item=Point),
    "two inputs": Case(
        Sum, lambda x, y: (x, x.flip(0), y), value=lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]), optimizer=momentum
    ),
    "dict": Case(item=as_dict, loss=lambda output, batch: F.cross_entropy(output, batch["y"]), value=by_name),
    "nested": Case(
        Nested,
        lambda x, y: ({"a": x, "b": x.flip(0)}, y),
        value=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    ),
    "tensor": Case(Coder, lambda x, y: x, F.mse_loss, lambda m, b: F.mse_loss(m(b), b)),
    "forward": Case(
        item=as_dict,
        loss=lambda output, batch: F.cross_entropy(output, batch["y"]),
        value=lambda m, b: F.cross_entropy(m.head(m.features(2 * b["x"])), b["y"]),
        options={"forward": lambda model, batch: model.head(model.features(2 * batch["x"]))},
    ),
    "whole batch": Case(
        loss=lambda output, batch: F.cross_entropy(output + batch[0][:, :OUT], batch[1]),
        value=lambda m, b: F.cross_entropy(m(b[0]) + b[0][:, :OUT], b[1]),
    ),
    "loss module": Case(loss=LossModule()),
    "own loss": Case(OwnLoss, as_dict, None, lambda m, b: m(**b).loss),
    "own loss by name": Case(OwnLossByName, as_dict, None, lambda m, b: m(**b)["loss"]),
    "several losses": Case(loss=parts, value=lambda m, b: sum(parts(m(b[0]), b[1]).values())),
    "sum and weight": Case(
        loss=masked,
        value=lambda m, b: masked(m(b[0]), b[1])[0] / masked(m(b[0]), b[1])[1],
        optimizer=momentum,
    ),
}


class Tied(nn.Module):
    """Input and output share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(IN, HIDDEN, bias=False), nn.Linear(HIDDEN, IN, bias=False)
        self.out.weight = nn.Parameter(self.into.weight.T.clone())
        self.code = nn.Linear(HIDDEN, HIDDEN)
        self.again = nn.Linear(HIDDEN, HIDDEN)
        self.again.weight = self.code.weight
        self.head = nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.out(torch.tanh(self.again(torch.tanh(self.code(torch.tanh(self.into(x))))))))


class Frozen(Net):
    """One layer that does not learn, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.idle = nn.Linear(HIDDEN, HIDDEN)


class Buffered(Net):
    """Counts its calls in a buffer that is added to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(OUT))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if self.training:
            self.calls += 0.125
        return super().forward(x) + self.calls * torch.arange(OUT)


class Norm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(super().features(x))


class Drop(Net):
    def features(self, x: Tensor) -> Tensor:
        return F.dropout(super().features(x), 0.3, self.training)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.cells, self.head = kind(4, 32, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(64, OUT)

    def forward(self, x: Tensor) -> Tensor:
        # (rows, IN) -> (rows, IN / 4, 4)
        return self.head(self.cells(x.view(len(x), -1, 4))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 256, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, OUT)

    def forward(self, x: Tensor) -> Tensor:
        words = (x * 4).long() % 16
        return self.head(self.block(self.embed(words)).mean(1))


class Conv(nn.Module):
    def __init__(self, layout: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8 * 1 * 2, OUT)
        self.layout = layout
        self.to(memory_format=layout)

    def forward(self, x: Tensor) -> Tensor:
        # (rows, IN) -> (rows, 2, 3, 4)
        x = x.view(len(x), 2, 3, IN // 6).contiguous(memory_format=self.layout)
        return self.head(self.layers(x).flatten(1))


class Sparse(nn.Module):
    """Gradients of the table are sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed((x * 4).long() % 16).mean(1))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    heads = [p for name, p in model.named_parameters() if name.startswith("head")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    return [{"params": rest}, {"params": heads, "lr": 0.5, "weight_decay": 0.3}]


KINDS = {
    "tied": Case(Tied, optimizer=momentum),
    "frozen and unused": Case(Frozen, optimizer=momentum),
    "unused, adamw": Case(Frozen, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01)),
    "buffers": Case(Buffered),
    "batch normalisation": Case(Norm, alone="statistics are each process's own"),
    "dropout": Case(Drop, alone="masks of two processes are not those of one"),
    "lstm": Case(Recurrent, optimizer=momentum),
    "gru": Case(lambda: Recurrent(nn.GRU), optimizer=momentum),
    "attention": Case(Attention, optimizer=momentum),
    "convolutions": Case(Conv, optimizer=momentum),
    "channels last": Case(lambda: Conv(torch.channels_last), optimizer=momentum),
    "sparse": Case(Sparse, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
    "groups": Case(groups=two_groups, optimizer=momentum),
    "groups, adamw": Case(groups=two_groups, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01)),
    "one cycle": Case(
        optimizer=momentum, scheduler=lambda o: schedules.OneCycleLR(o, max_lr=0.2, total_steps=2 * STEPS)
    ),
    "lambda": Case(scheduler=lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step))),
    "sequential": Case(
        optimizer=momentum,
        scheduler=lambda o: schedules.SequentialLR(
            o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.ExponentialLR(o, 0.5)], milestones=[2]
        ),
    ),
    "clipped": Case(optimizer=momentum, options={"clip": 0.05}),
    "clipped, adam": Case(options={"clip": 0.05}),
    "micro-batches": Case(options={"accumulate": 3}),
    "micro-batches of factors": Case(optimizer=momentum, options={"accumulate": 4, "clip": 0.05}),
    "micro-batches, weighted": Case(
        loss=masked,
        value=lambda m, b: masked(m(b[0]), b[1])[0] / masked(m(b[0]), b[1])[1],
        optimizer=momentum,
        options={"accumulate": 5},
    ),
}
RATES = {
    "SGD": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adagrad": {"lr": 0.05},
    "Adafactor": {"lr": 0.05},
    "Muon": {"lr": 0.02},
    "Rprop": {"lr": 0.01},
}
OPTIMIZERS = {
    name: Case(
        optimizer=lambda p, kind=kind, name=name: kind(p, **RATES.get(name, {"lr": 0.01})),
        # Muon takes matrices alone
        groups=(lambda m: [p for p in m.parameters() if p.dim() == 2]) if name == "Muon" else Case.groups,
    )
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
}
TABLES = {"shape": SHAPES, "model": KINDS, "optimizer": OPTIMIZERS}


def write(folder: Path, name: str, result: dict[str, Any]) -> None:
    facts = {key: value for key, value in result.items() if key != "weights"}
    save_file(result["weights"], folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(facts))
