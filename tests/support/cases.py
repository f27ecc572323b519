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
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

import paceline
from device import DEVICE

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
        model = self.model().to(DEVICE, torch.float64)
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
            batch = tree_map(lambda part: part.to(DEVICE), batch)
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


def write(folder: Path, name: str, result: dict[str, Any]) -> None:
    facts = {key: value for key, value in result.items() if key != "weights"}
    save_file(result["weights"], folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(facts))
