"""`verify` names the cause for which N nodes are not one: of many causes, of two at once, and of those unforeseen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.planner import verify
from paceline.planner.diagnose.causes import KINDS, Cause
from paceline.planner.diagnose.equivalence import Comparison
from verifying import HIDDEN, IN, OUT, Script, kinds, rank, size, verified

CLASSES = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(IN, HIDDEN), *between, nn.Tanh(), nn.Linear(HIDDEN, OUT))


def normed() -> nn.Module:
    return mlp(nn.BatchNorm1d(HIDDEN))


def tokens(x: Tensor, y: Tensor, i: int) -> Any:
    """Six positions, of which samples count unlike numbers."""
    return x, torch.where(torch.arange(IN) < 1 + i % 5, y, -100)


class PerToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(1, HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x[..., None])))


def per_token(output: Tensor, y: Tensor) -> Tensor:
    return 1.0 * F.cross_entropy(output.flatten(0, 1), y.flatten())


def contrast(output: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(output, dim=1)
    return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)))


class Codebook(nn.Module):
    """VQ, its codes moving averages of what they were chosen for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cdist(x.detach(), self.codes).argmin(1)
        near = self.codes[chosen]
        with torch.no_grad():
            for code in chosen.unique():
                self.codes[code].lerp_(x[chosen == code].mean(0), 0.1)
        return x + (near - x).detach()


class Teacher(nn.Module):
    """A second layer follows the first by momentum, inside forward."""

    def __init__(self, moves: Any = lambda: True) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        if self.moves():
            with torch.no_grad():
                for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mine.lerp_(its, 0.2)
        return self.student(x) + self.teacher(x.detach())


def in_chunks(pace: Any, model: nn.Module, rows: Any) -> Tensor:
    """As many passes as the process's samples need."""
    return F.cross_entropy(torch.cat([model(part) for part in rows[0].split(4)]), rows[1])


class Noise(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.draw(x)


def unseeded(x: Tensor) -> Tensor:
    return torch.from_numpy(numpy.random.default_rng().normal(size=tuple(x.shape)))


class Low(nn.Module):
    """As transformers computes a loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), y)


class BySize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if len(x) > 8 else x


def clipped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * (0.01 / (grad.norm() + 1e-6)).clamp(max=1.0))


def of_rank(x: Tensor, y: Tensor, i: int) -> Any:
    return x + rank(), y


def evaluated(pace: Any, model: nn.Module) -> None:
    if pace.num_steps == 1:
        from verifying import Rows

        pace.evaluate(Rows(lambda x, y, i: (x, y)), lambda output, y: output.square().mean())


CAUSES = {
    "batch norm": Script(normed),
    "weighted mean": Script(PerToken, per_token, tokens),
    "weighted mean ": Script(mlp, lambda output, y: 1.0 * F.cross_entropy(output, y, weight=CLASSES)),
    "sum": Script(mlp, lambda output, y: F.cross_entropy(output, y, reduction="sum") / 12),
    "compares samples": Script(mlp, contrast),
    "buffers": Script(lambda: mlp(Codebook())),
    "momentum encoder": Script(lambda: mlp(Teacher()), own=in_chunks),
    "rank": Script(lambda: mlp(Teacher(lambda: rank() == 0))),
    "unseeded randomness": Script(lambda: mlp(Noise(unseeded))),
    "data": Script(mlp, item=of_rank),
    "metric": Script(mlp, between=evaluated),
    "layer by size": Script(lambda: mlp(BySize())),
    "loss by size": Script(mlp, lambda output, y: F.cross_entropy(output, y) * (2 if len(y) > 8 else 1)),
    "gradient hook": Script(mlp, prepare=clipped),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named_and_no_other(cause, tmp_path, monkeypatch):
    found = verified(CAUSES[cause], tmp_path, monkeypatch)
    assert not found.same
    assert kinds(found) == {cause.strip()}, found.causes


def test_a_float32_loss_in_a_float64_model_is_the_same_and_is_said(tmp_path, monkeypatch):
    """Story: of GPT-2 and Llama parameters agreed to 1e-12, the loss to 1e-7, and verify said NOT the same."""
    found = verified(Script(mlp, Low()), tmp_path, monkeypatch)
    assert found.loss > found.tolerance
    assert found.same
    assert kinds(found) == {"float32"}


PAIRS = {
    ("batch norm", "weighted mean"): Script(normed, lambda output, y: 1.0 * F.cross_entropy(output, y, weight=CLASSES)),
    ("batch norm", "compares samples"): Script(normed, contrast),
    ("sum", "gradient hook"): Script(
        mlp, lambda output, y: F.cross_entropy(output, y, reduction="sum") / 12, prepare=clipped
    ),
    ("buffers", "batch norm"): Script(lambda: mlp(Codebook(), nn.BatchNorm1d(HIDDEN))),
    ("data", "batch norm"): Script(normed, item=of_rank),
    ("unseeded randomness", "sum"): Script(
        lambda: mlp(Noise(unseeded)), lambda output, y: F.cross_entropy(output, y, reduction="sum") / 12
    ),
    ("rank", "layer by size"): Script(lambda: mlp(Teacher(lambda: rank() == 0), BySize())),
    ("float32", "batch norm"): Script(normed, Low()),
    ("sum", "compares samples"): Script(
        mlp,
        lambda output, y: {"a": F.cross_entropy(output, y, reduction="sum") / 12, "b": contrast(output, y)},
    ),
}


@pytest.mark.parametrize("both", PAIRS, ids=" and ".join)
def test_two_causes_at_once_are_both_named(both, tmp_path, monkeypatch):
    found = verified(PAIRS[both], tmp_path, monkeypatch)
    assert not found.same
    assert kinds(found) == set(both), found.causes


class Spread(nn.Module):
    """The standard deviation over the batch as one more feature, as in progressive GANs."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.std(0).mean()


class Bank(nn.Module):
    """Remembers the features of the samples before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        bank = torch.stack(self.seen).mean(0) if self.seen else 0.0
        self.seen = [x.detach().mean(0), *self.seen[:3]]
        return x + bank


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-12)


class NormedBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Normed.apply(x)


class Hooked(nn.Module):
    """A hook on an activation, put there by forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = 1.0 * x
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (0.001 / (grad.norm() + 1e-12)).clamp(max=1.0))
        return x


class Capacity(nn.Module):
    """Experts that take no more than so many samples each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, 2), nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.gate(x).argmax(1), x.clone()
        for number, expert in enumerate(self.experts):
            taken = (chosen == number).nonzero()[:3, 0]
            if len(taken):
                out = out.index_add(0, taken, expert(x[taken]))
        return out


class Sideways(nn.Module):
    """Attention that was to be over time, and is over samples: batch_first was forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].repeat(1, 3, 1)
        return self.attend(x, x, x, need_weights=False)[0].mean(1)


class Observer(nn.Module):
    """Scales by the largest value that it has seen, as quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.most.copy_(torch.maximum(self.most, x.abs().max()))
        return x


class Centre:
    """A loss with a moving mean of its own, as DINO's."""

    def __init__(self) -> None:
        self.centre = torch.zeros(OUT, dtype=torch.float64)

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(output - self.centre, y)
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        return loss


class Langevin(torch.optim.SGD):
    """Adds noise to the weights."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.from_numpy(numpy.random.normal(size=tuple(parameter.shape))), alpha=0.01)


class Bins(torch.utils.data.Dataset[Any]):
    """Samples of unlike lengths, for a collate_fn that pads to the longest."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        dice = torch.Generator().manual_seed(i)
        return torch.randn(2 + i % 11, IN, generator=dice), torch.tensor(i % OUT)


def padded(items: list[Any]) -> Any:
    x = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return x, torch.stack([y for _, y in items])


class OverTime(nn.Module):
    """A mean over time that counts what is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1)


def by_frequency(output: Tensor, y: Tensor) -> Tensor:
    """The rarer a label is among these, the more it weighs."""
    counts = torch.bincount(y, minlength=OUT).clamp_min(1)
    return (F.cross_entropy(output, y, reduction="none") * len(y) / counts[y]).mean()


def dice(output: Tensor, y: Tensor) -> Tensor:
    """Of the whole batch, as in segmentation."""
    p, t = output.softmax(1), F.one_hot(y, OUT)
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum() + p.square().sum())


class Augmented(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        x, y = self.rows[i]
        return x + 0.1 * torch.randn(IN), y


class OverSamples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.softmax(0)


UNFORESEEN = {
    "layer": Script(lambda: mlp(Spread())),
    "hidden state": Script(lambda: mlp(Bank())),
    "function of a mean": Script(mlp, lambda output, y: F.mse_loss(output, F.one_hot(y, OUT).double()).sqrt()),
    "compares samples": Script(mlp, dice),
    "backward": Script(lambda: mlp(NormedBack())),
    "gradient hook": Script(lambda: mlp(Hooked())),
    "layer ": Script(lambda: mlp(Capacity())),
    "layer  ": Script(lambda: mlp(Sideways())),
    "layer   ": Script(lambda: mlp(OverSamples())),
    "buffers": Script(lambda: mlp(Observer())),
    "hidden state ": Script(mlp, Centre()),
    "settings": Script(mlp, rate=lambda: 0.1 * size()),
    "number of processes": Script(mlp, lambda output, y: F.cross_entropy(output, y) * size()),
    "batch weights": Script(mlp, by_frequency),
    "padding": Script(OverTime, data=lambda _: torch.utils.data.DataLoader(Bins(), batch_size=12, collate_fn=padded)),
    "random numbers": Script(lambda: mlp(Noise(torch.randn_like))),
    "update": Script(mlp, optimizer=lambda p: Langevin(p, lr=0.1)),
    "data drawn when read": Script(mlp, data=Augmented),
}


@pytest.mark.parametrize("cause", UNFORESEEN)
def test_a_cause_that_nobody_had_in_mind_is_named(cause, tmp_path, monkeypatch):
    found = verified(UNFORESEEN[cause], tmp_path, monkeypatch)
    assert not found.same
    assert kinds(found) == {cause.strip()}, found.causes


def test_the_page_explains_every_cause():
    page = (Path(__file__).parents[2] / "docs" / "same.md").read_text()
    assert {kind for kind in KINDS if f"| `{kind}` |" not in page} == set()


@pytest.mark.parametrize(("steps", "kind"), [(3, "layer"), (1, "unknown")])
def test_what_the_last_weights_hide_the_first_may_show(steps, kind, monkeypatch):
    """A branch over the whole batch was taken in the first steps alone, and the experiments came after the last."""
    asked = []

    def start(command, engine, nodes, environment):
        asked.append(json.loads(environment["PACELINE_VERIFY"])["steps"])
        return 0

    def explained(compared, *_):
        return replace(compared, causes=(Cause.of("layer" if compared.steps == 1 < steps else "unknown", "it"),))

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(verify.local, "start", start)
    monkeypatch.setattr(verify, "_run", lambda *_: 0)
    monkeypatch.setattr(verify, "finished", lambda folder: ["join0"])
    monkeypatch.setattr(verify, "compare", lambda *_: Comparison(asked[-1], 0.1, 0.1, "w", 1e-9, 0.1))
    monkeypatch.setattr(verify, "explain", explained)
    found = verify.verify(["script.py"], steps, 2, "sequential", "float64")
    assert asked == ([3, 1] if steps == 3 else [1])
    assert found.steps == steps
    assert [cause.kind for cause in found.causes] == [kind]
