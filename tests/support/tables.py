"""More trainings beside their plain loops: models, ways to learn, and every optimizer of PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

from cases import HIDDEN, IN, OUT, SHAPES, STEPS, Case, Net, masked, momentum


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
        return super().forward(x) + self.calls * torch.arange(OUT, device=self.calls.device)


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
