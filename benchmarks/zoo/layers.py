"""Unusual layers, written as they are found in public code: parametrizations, adapters, experts, fields, tables."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from zoo.case import Parts, family, images, labels, numbers, table

case = family("layers")
SYNC = {"batch_norm": "sync"}


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    parts: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        parts += [nn.Linear(wide, narrow), act()]
    return nn.Sequential(*parts[:-1])


@case(SGD, lr=0.1, momentum=0.9)
def perceptron() -> Parts:
    return mlp(8, 128, 128, 3), table(), F.cross_entropy


@case(Adam, lr=0.01, join={"accumulate": 2})
def perceptron_in_parts() -> Parts:
    return mlp(8, 64, 64, 3), table(), nn.CrossEntropyLoss(label_smoothing=0.1)


@case(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4, schedule=partial(StepLR, step_size=2))
def weight_norm() -> Parts:
    norm = parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(8, 64)), nn.ReLU(), norm(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 3))
    return model, table(), F.cross_entropy


@case(Adam, lr=0.01)
def spectral_norm() -> Parts:
    norm = parametrizations.spectral_norm
    model = nn.Sequential(
        norm(nn.Conv2d(3, 8, 3, stride=2)), nn.LeakyReLU(), nn.Flatten(), norm(nn.Linear(8 * 49, 16)), nn.Linear(16, 5)
    )
    return model, images(16), F.cross_entropy


@case(SGD, lr=0.05, momentum=0.5)
def old_spectral_norm() -> Parts:
    """By hooks before forward, as before parametrizations."""
    norm = nn.utils.spectral_norm
    return nn.Sequential(norm(nn.Linear(8, 32)), nn.Tanh(), norm(nn.Linear(32, 3))), table(), F.cross_entropy


@case(Adagrad, lr=0.05)
def orthogonal() -> Parts:
    ortho = parametrizations.orthogonal
    return (
        nn.Sequential(nn.Linear(8, 16), ortho(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 3)),
        table(),
        F.cross_entropy,
    )


class Tied(nn.Module):
    """An autoencoder whose decoder is its encoder, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.bias = nn.Linear(12, 5), nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encode(x)), self.encode.weight.T, self.bias)


@case(Rprop, lr=0.01)
def tied_autoencoder() -> Parts:
    x = numbers(12)
    return Tied(), TensorDataset(x, x), F.mse_loss


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(8, 32, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@case(AdamW, lr=0.01, schedule=partial(CosineAnnealingLR, T_max=6))
def checkpointed() -> Parts:
    return Checkpointed(), table(), F.cross_entropy


class DLRM(nn.Module):
    """Recommendation: bags of words, a dense part, and the products of them all."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.dense, self.top = mlp(4, 16, 8), mlp(8 + 6, 16, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        parts = [self.dense(dense), *(bag(ids) for bag, ids in zip(self.bags, sparse.unbind(1), strict=True))]
        stack = torch.stack(parts, 1)
        pairs = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([parts[0], (stack @ stack.mT)[:, pairs[0], pairs[1]]], 1)).squeeze(1)


@case(Adagrad, lr=0.05)
def dlrm() -> Parts:
    clicks = labels(2).to(torch.get_default_dtype())
    data = TensorDataset(numbers(4), labels(50, 3, 4, seed=8), clicks)
    return DLRM(), data, F.binary_cross_entropy_with_logits


class WideDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.EmbeddingBag(200, 1, mode="sum", sparse=True), mlp(6 * 8, 32, 1)
        self.words = nn.Embedding(200, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.wide(ids) + self.deep(self.words(ids).flatten(1))).squeeze(1)


@case(SGD, lr=0.1)
def wide_and_deep() -> Parts:
    """Sparse gradients of one of the tables."""
    return WideDeep(), TensorDataset(labels(200, 6), numbers().sigmoid()), nn.BCEWithLogitsLoss()


class QAT(nn.Module):
    """Quantization-aware training: observers move their ranges with each batch."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        fake = partial(FakeQuantize, observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        self.first, self.quant, self.last = nn.Linear(8, 32), fake(), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        return self.last(self.quant(hidden.float()).to(hidden.dtype))


@case(Adam, lr=0.01, differs="buffer|running|forward changes")
def fake_quantized() -> Parts:
    return QAT(), table(), F.cross_entropy


class StraightThrough(nn.Module):
    """Binarized weights, with the gradient passed straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        binary = weight + (weight.sign() - weight).detach()
        return self.last(F.hardtanh(F.linear(x, binary, self.first.bias)))


@case(Adam, lr=0.01)
def binarized() -> Parts:
    return StraightThrough(), table(), F.cross_entropy


class LoRA(nn.Module):
    def __init__(self, inner: nn.Linear, width: int = 2):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(width, inner.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(inner.out_features, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(F.linear(x, self.down), self.up)


@case(AdamW, lr=0.02, weight_decay=0.1)
def lora() -> Parts:
    model = mlp(8, 64, 64, 3)
    for i in (0, 2):
        model[i] = LoRA(model[i])
    model[4].requires_grad_(False)
    model[4].bias.requires_grad_(True)
    return model, table(), F.cross_entropy


class Hyper(nn.Module):
    """A network that makes the weights of another one, for each sample's task."""

    def __init__(self) -> None:
        super().__init__()
        self.target = mlp(4, 6, 1).requires_grad_(False)
        self.sizes = {name: each.shape for name, each in self.target.named_parameters()}
        self.make = mlp(3, 16, sum(each.numel() for each in self.sizes.values()))

    def forward(self, task: Tensor, x: Tensor) -> Tensor:
        def one(flat: Tensor, row: Tensor) -> Tensor:
            parts = flat.split([shape.numel() for shape in self.sizes.values()])
            weights = {n: p.view(s) for (n, s), p in zip(self.sizes.items(), parts, strict=True)}
            return functional_call(self.target, weights, (row,)).squeeze(-1)

        return torch.vmap(one)(self.make(task), x)


@case(Adamax, lr=0.01)
def hypernetwork() -> Parts:
    return Hyper(), TensorDataset(numbers(3), numbers(4, seed=6), numbers(seed=7)), F.mse_loss


class MAML(nn.Module):
    """Meta-learning: an inner step on each sample's support set, inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(1, 16, 1, act=nn.Tanh)

    def forward(self, x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())

        def task(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
            def inner(w: dict[str, Tensor]) -> Tensor:
                return F.mse_loss(functional_call(self.net, w, (x,)), y)

            moved = {name: weights[name] - 0.1 * g for name, g in grad(inner)(weights).items()}
            return functional_call(self.net, moved, (query,)).squeeze(-1)

        return torch.vmap(task)(x, y, query)


@case(Adam, lr=0.01)
def maml() -> Parts:
    phase = numbers(1, 1, seed=6)
    x, query = numbers(5, 1, seed=7), numbers(5, 1, seed=8)
    return MAML(), TensorDataset(x, (x + phase).sin(), query, (query + phase).sin().squeeze(-1)), F.mse_loss


class ODE(nn.Module):
    """A neural differential equation, by Runge and Kutta."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = mlp(4, 32, 4, act=nn.Tanh), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = 0.25
        for _ in range(4):
            a = self.field(x)
            b = self.field(x + h / 2 * a)
            c = self.field(x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + self.field(x + h * c))
        return self.head(x)


@case(RAdam, lr=0.02)
def neural_ode() -> Parts:
    return ODE(), table(4), F.cross_entropy


class Equilibrium(nn.Module):
    """A deep equilibrium: a fixed point without gradients, and one step with them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.inject, self.head = nn.Linear(16, 16), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        injected, z = self.inject(x), x.new_zeros(len(x), 16)
        with torch.no_grad():
            for _ in range(12):
                z = torch.tanh(0.3 * self.inside(z) + injected)
        return self.head(torch.tanh(0.3 * self.inside(z) + injected))


@case(NAdam, lr=0.01)
def deep_equilibrium() -> Parts:
    return Equilibrium(), table(), F.cross_entropy


class KAN(nn.Module):
    """Kolmogorov and Arnold: on each edge a function, of radial bases."""

    def __init__(self, wide: int, narrow: int):
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 6))
        self.base, self.spline = nn.Linear(wide, narrow), nn.Parameter(torch.randn(narrow, wide, 6) / 10)

    def forward(self, x: Tensor) -> Tensor:
        bases = torch.exp(-((x[..., None] - self.grid) ** 2))
        return self.base(F.silu(x)) + torch.einsum("bik,oik->bo", bases, self.spline)


@case(Adadelta, lr=0.5)
def kolmogorov_arnold() -> Parts:
    return nn.Sequential(KAN(8, 8), KAN(8, 3)), table(), F.cross_entropy


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * x)


@case(Adam, lr=1e-4, schedule=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)))
def siren() -> Parts:
    x = numbers(2).tanh()
    model = mlp(2, 32, 32, 1, act=Sine)
    for each in model:
        if isinstance(each, nn.Linear):
            nn.init.uniform_(each.weight, -math.sqrt(6 / each.in_features) / 30, math.sqrt(6 / each.in_features) / 30)
    return model, TensorDataset(x, (3 * x).sin().sum(1, keepdim=True)), F.mse_loss


class NeRF(nn.Module):
    """Rays, positions encoded by sines, and what is seen along them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3 * 8, 32, 4)

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        t = torch.linspace(0, 1, 6)
        points = origin[:, None] + t[None, :, None] * direction[:, None]
        waves = [f(2.0**i * points) for i in range(4) for f in (torch.sin, torch.cos)]
        out = self.net(torch.cat(waves, -1))
        alpha = 1 - torch.exp(-F.softplus(out[..., 3]) / 6)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
        return ((alpha * through)[..., None] * out[..., :3].sigmoid()).sum(1)


@case(RAdam, lr=0.005, join={"clip": 0.1})
def nerf() -> Parts:
    return (
        NeRF(),
        TensorDataset(numbers(3), F.normalize(numbers(3, seed=6), dim=1), numbers(3, seed=7).sigmoid()),
        F.mse_loss,
    )


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(
            nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1), nn.BatchNorm1d(32), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.each(points).amax(2))


@case(SGD, lr=0.05, momentum=0.9, join=SYNC)
def pointnet() -> Parts:
    return PointNet(), TensorDataset(numbers(3, 20), labels(4)), F.cross_entropy


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = mlp(3, 32, 16), mlp(16, 16, 2)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        return self.all((self.each(x) * present[..., None]).sum(1))


@case(RMSprop, lr=0.005, momentum=0.9, centered=True)
def deep_sets() -> Parts:
    return (
        DeepSets(),
        TensorDataset(numbers(7, 3), labels(2, 7).to(torch.get_default_dtype()), labels(2)),
        F.cross_entropy,
    )


class Experts(nn.Module):
    """A mixture of experts: the best two of four, by a gate."""

    def __init__(self, balanced: bool = False):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(mlp(8, 32, 8) for _ in range(4))
        self.head, self.balanced = nn.Linear(8, 3), balanced

    def forward(self, x: Tensor) -> Any:
        chances = self.gate(x).softmax(-1)
        best, which = chances.topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = (which == i).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, best[rows, place, None] * expert(x[rows]))
        if not self.balanced:
            return self.head(x + out)
        used = F.one_hot(which, 4).to(x.dtype).sum(1).mean(0)
        return self.head(x + out), 4 * (used * chances.mean(0)).sum()


@case(Adam, lr=0.01)
def experts() -> Parts:
    """On some nodes no row goes to some experts, which get no gradient there."""
    return Experts(), table(), F.cross_entropy


def balanced(output: Any, target: Tensor) -> dict[str, Tensor]:
    return {"class": F.cross_entropy(output[0], target), "balance": 0.1 * output[1]}


@case(Adam, lr=0.01, differs="mixes samples|layer|compares|not a mean|by size|function of a mean")
def experts_balanced() -> Parts:
    """With a loss that balances how often each is used over the batch: a product of two means."""
    return Experts(True), table(), balanced


class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 32, 9)

    def forward(self, x: Tensor) -> torch.distributions.Distribution:
        weight, mean, scale = self.net(x).chunk(3, -1)
        normal = torch.distributions.Normal(mean, F.softplus(scale) + 0.01)
        return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=weight), normal)


@case(ASGD, lr=0.01)
def mixture_density() -> Parts:
    return (
        MixtureDensity(),
        TensorDataset(numbers(4), numbers(seed=6)),
        lambda output, target: -output.log_prob(target).mean(),
    )


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.value = mlp(8, 32, 16), nn.Linear(16, 3), nn.Linear(16, 1)
        self.noise = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, kind: Tensor, value: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        scale = torch.exp(-self.noise)
        return {
            "kind": scale[0] * F.cross_entropy(self.kind(h), kind) + self.noise[0],
            "value": scale[1] * F.mse_loss(self.value(h).squeeze(1), value) + self.noise[1],
        }


def parts_of(output: dict[str, Tensor], batch: Any) -> dict[str, Tensor]:
    return output


@case(Adam, lr=0.01, schedule=partial(OneCycleLR, max_lr=0.02, total_steps=8))
def several_tasks() -> Parts:
    """Weighted by what the model is uncertain of; the loss is a dict."""
    from zoo.case import Named

    return Tasks(), Named(x=numbers(8), kind=labels(3), value=numbers(seed=6)), parts_of


class Teacher(nn.Module):
    """Knowledge distillation: a large network that stays as it is, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
        self.teacher.requires_grad_(False).eval()
        self.student = mlp(8, 16, 3)

    def train(self, mode: bool = True) -> Teacher:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wise = self.teacher(x)
        return self.student(x), wise


def distilled(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    student, teacher = output
    soft = F.kl_div(
        (student / 2).log_softmax(-1), (teacher / 2).log_softmax(-1), log_target=True, reduction="batchmean"
    )
    return 0.5 * F.cross_entropy(student, target) + 2 * soft


@case(SGD, lr=0.1, momentum=0.9)
def distillation() -> Parts:
    return Teacher(), table(), distilled


@case(SGD, lr=0.1, weight_decay=1e-3)
def class_weights() -> Parts:
    return mlp(8, 32, 3), table(), nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]))


class Recursive(nn.Module):
    """The same block until a row has had enough: as many times as each row asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.halt, self.head = mlp(8, 16, 8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, out = torch.ones(len(x), 1), torch.zeros_like(x)
        for _ in range(6):
            x = torch.tanh(x + self.block(x))
            stop = self.halt(x).sigmoid() * left
            out, left = out + stop * x, left - stop
            if (left < 0.05).all():
                break
        return self.head(out + left * x)


@case(Adam, lr=0.01, differs="mixes samples|layer|by size|branch|number of samples")
def adaptive_time() -> Parts:
    """The loop ends when all samples of the batch have had enough."""
    return Recursive(), table(), F.cross_entropy


class StandardConv(nn.Conv2d):
    """Weight standardization."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


@case(SGD, lr=0.05, momentum=0.9)
def group_norm() -> Parts:
    model = nn.Sequential(
        StandardConv(3, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.ReLU(), StandardConv(16, 16, 3), nn.GroupNorm(4, 16),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    return model, images(12), F.cross_entropy


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 16, 3, bias=False),
        nn.BatchNorm2d(16, momentum=None), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


@case(SGD, lr=0.05, momentum=0.9, join=SYNC)
def batch_norm_sync() -> Parts:
    return normed(), images(12), F.cross_entropy


@case(SGD, lr=0.05, momentum=0.9, differs="batch norm")
def batch_norm_local() -> Parts:
    return normed(), images(12), F.cross_entropy


@case(SGD, lr=0.05, momentum=0.9)
def instance_norm() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 5),
    )  # fmt: skip
    return model, images(12), F.cross_entropy


@case(AdamW, lr=0.01)
def averaged_weights(optimizer: Any, join: Any) -> Any:
    """An average of the weights beside them, by torch's own class, after each step."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = mlp(8, 32, 3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses = []
    with join(model, optimizer(model.parameters()), F.cross_entropy, batch_size=12) as pace:
        for batch in pace.batches(table(), 2, shuffle=False):
            losses.append(pace.step(batch))
            average.update_parameters(model)
    return [model, average.module], losses


@case(SGD, lr=0.05)
def groups_of_parameters(optimizer: Any, join: Any) -> Any:
    """A rate and decay for each, and layers that are frozen first, by a rate of 0."""
    model = mlp(8, 32, 32, 3)
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": model[2].parameters(), "weight_decay": 0.01, "momentum": 0.9},
        {"params": model[4].parameters(), "lr": 0.2},
    ]
    stepper, losses = optimizer(groups), []
    with join(model, stepper, F.cross_entropy, batch_size=12, clip=0.5) as pace:
        for i, batch in enumerate(pace.batches(table(), 2, shuffle=False)):
            stepper.param_groups[0]["lr"] = 0.1 if i >= 2 else 0.0
            losses.append(pace.step(batch))
    return [model], losses
