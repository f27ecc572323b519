"""Models that learn from pairs, from a slower copy of themselves, or from the other samples of a batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import TensorDataset

from zoo.case import Named, Parts, family, labels, numbers
from zoo.layers import mlp

case = family("contrastive")
ACROSS = "compares"


def views() -> tuple[Tensor, Tensor]:
    x = numbers(10)
    return x + 0.1 * numbers(10, seed=8), x + 0.1 * numbers(10, seed=9)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(10, 32, 8)

    def forward(self, *views: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.normalize(self.net(view), dim=1) for view in views)


def pairs(output: tuple[Tensor, Tensor], same: Tensor) -> Tensor:
    apart = (output[0] - output[1]).norm(dim=1)
    return torch.where(same > 0, apart.square(), F.relu(1 - apart).square()).mean()


@case(Adam, lr=0.01)
def siamese() -> Parts:
    return Siamese(), TensorDataset(*views(), labels(2)), pairs


def triplets(output: tuple[Tensor, ...], _: Any) -> Tensor:
    return F.triplet_margin_loss(*output, margin=0.5)


@case(SGD, lr=0.1, momentum=0.9)
def triplet() -> Parts:
    return Siamese(), TensorDataset(*views(), numbers(10, seed=12), labels(2)), triplets


def cosines(output: tuple[Tensor, Tensor], same: Tensor) -> Tensor:
    return F.cosine_embedding_loss(*output, 2 * same - 1)


@case(AdamW, lr=0.01)
def cosine_pairs() -> Parts:
    return Siamese(), TensorDataset(*views(), labels(2)), cosines


class ArcFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.classes = mlp(10, 32, 8), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.net(x), dim=1), F.normalize(self.classes, dim=1)).clamp(-0.999, 0.999)
        return 8 * torch.where(F.one_hot(label, 4) > 0, torch.cos(torch.acos(cosine) + 0.3), cosine)


@case(SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)
def arcface() -> Parts:
    label = labels(4)
    return ArcFace(), TensorDataset(numbers(10), label, label), F.cross_entropy


def info_nce(output: tuple[Tensor, Tensor], _: Any) -> Tensor:
    scores = output[0] @ output[1].T / 0.2
    return F.cross_entropy(scores, torch.arange(len(scores)))


@case(Adam, lr=0.01, differs=ACROSS)
def simclr() -> Parts:
    """Every other sample of the batch is a negative: of the parts of a batch each has fewer."""
    return Siamese(), TensorDataset(*views(), labels(2)), info_nce


def barlow(output: tuple[Tensor, Tensor], _: Any) -> Tensor:
    a, b = ((each - each.mean(0)) / each.std(0) for each in output)
    cross = a.T @ b / len(a)
    return (cross - torch.eye(8)).square().sum()


@case(Adam, lr=0.005, differs=ACROSS)
def barlow_twins() -> Parts:
    return Siamese(), TensorDataset(*views(), labels(2)), barlow


class Momentum(nn.Module):
    """A second network follows the first, at each forward."""

    def __init__(self, queue: int = 0):
        super().__init__()
        self.net, self.ahead = mlp(10, 32, 8), mlp(8, 16, 8)
        self.slow = copy.deepcopy(self.net).requires_grad_(False)
        self.queue: Tensor
        self.register_buffer("queue", F.normalize(torch.randn(queue, 8), dim=1) if queue else torch.zeros(0, 8))

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
        with torch.no_grad():
            key = F.normalize(self.slow(two), dim=1)
        query = F.normalize(self.ahead(self.net(one)), dim=1)
        return query, key, self.queue.clone()


def byol_loss(output: tuple[Tensor, ...], _: Any) -> Tensor:
    return 2 - 2 * (output[0] * output[1]).sum(1).mean()


@case(SGD, lr=0.1, momentum=0.9, differs="momentum|forward changes|replica")
def byol() -> Parts:
    return Momentum(), TensorDataset(*views(), labels(2)), byol_loss


def moco_loss(output: tuple[Tensor, ...], _: Any) -> Tensor:
    query, key, queue = output
    scores = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], 1) / 0.2
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


@case(SGD, lr=0.1, momentum=0.9, differs="momentum|forward changes|replica")
def moco_fixed_queue() -> Parts:
    return Momentum(16), TensorDataset(*views(), labels(2)), moco_loss


class MoCo(Momentum):
    """The queue takes in the keys of each batch."""

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, queue = super().forward(one, two)
        if self.training:
            self.queue.copy_(torch.cat([self.queue, key])[-len(self.queue) :])
        return query, key, queue


@case(SGD, lr=0.1, momentum=0.9, differs="buffer|forward changes")
def moco() -> Parts:
    return MoCo(16), TensorDataset(*views(), labels(2)), moco_loss


@case(SGD, lr=0.1, momentum=0.9)
def mean_teacher(optimizer: Any, join: Any) -> Any:
    """A slower copy outside the model, moved after each step, that the loss compares with."""
    student = mlp(10, 32, 4)
    teacher = copy.deepcopy(student).requires_grad_(False)
    one, two = views()
    losses = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            wise = teacher(batch["two"])
        return F.cross_entropy(output, batch["label"]) + F.mse_loss(output.softmax(1), wise.softmax(1))

    def forward(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["one"])

    options = {"batch_size": 12, "forward": forward}
    with join(student, optimizer(student.parameters()), loss, **options) as pace:
        for batch in pace.batches(Named(one=one, two=two, label=labels(4)), 2, shuffle=False):
            losses.append(pace.step(batch))
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
    return [student, teacher], losses
