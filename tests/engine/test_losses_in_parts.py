"""A loss that is not the mean of its parts is reported in the first step, and looking at it changes nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

import nodes
import ranks
from paceline.engine import sequential
from paceline.engine.checks.loss_in_parts import SCORES, unlike

ROWS = 12
dice = torch.Generator().manual_seed(5)
A, B = (torch.randn(ROWS, 6, generator=dice, dtype=torch.float64) for _ in range(2))
CLASSES = torch.randint(0, 6, (ROWS,), generator=dice)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]], dtype=torch.float64).repeat_interleave(6, 0)[:ROWS]
WEIGHT = torch.tensor([5.0, 0.1, 1.0, 3.0, 0.2, 1.0], dtype=torch.float64)


def info_nce(output: Any, target: Any) -> Tensor:
    return F.cross_entropy(output[0] @ output[1].T, torch.arange(len(target)))


def barlow(output: Any, target: Any) -> Tensor:
    one, two = ((each - each.mean(0)) / each.std(0) for each in output)
    return (one.T @ two / len(target) - torch.eye(6)).square().sum()


def hardest(output: Tensor, target: Tensor) -> Tensor:
    """The hardest positive and negative of the batch."""
    apart, same = torch.cdist(output, output), target[:, None] % 2 == target % 2
    return F.relu(apart.where(same, 0).amax(1) - apart.where(~same, 1e9).amin(1) + 1).mean()


def masked(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).square() * MASK[: len(target)]).sum() / MASK[: len(target)].sum()


def by_weight(output: Tensor, target: Tensor) -> Tensor:
    return (WEIGHT[target] * F.cross_entropy(output, target, reduction="none")).sum() / WEIGHT[target].sum()


def penalized(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A penalty that each process would add once."""
    return F.cross_entropy(output, target, reduction="sum") + WEIGHT.square().sum(), len(target)


@pytest.mark.parametrize(
    ("loss", "output", "target"),
    [
        (info_nce, (A, B), CLASSES),
        (barlow, (A, B), CLASSES),
        (hardest, A, torch.arange(ROWS)),
        (masked, A, B),
        (by_weight, A, CLASSES),
        (penalized, A, CLASSES),
        (lambda output, target: (output - target).square().sum(), A, B),
        (lambda output, target: (output - target).norm(), A, B),
        (lambda output, target: {"sum": (output - target).square().sum(), "mean": F.mse_loss(output, target)}, A, B),
        (partial(lambda output, target, power: (output - target).abs().pow(power).sum(), power=3), A, B),
        (lambda output, batch: F.cross_entropy(output.logits @ output.logits.T, torch.arange(len(output.logits))),
         SequenceClassifierOutput(logits=A), {"x": A}),
    ],
)  # fmt: skip
def test_a_loss_that_is_another_in_parts_is_reported(loss, output, target):
    batch = target if isinstance(target, dict) else (A, target)
    said = unlike(loss, output, batch, ROWS)
    assert "the loss of 8 samples is" in said
    assert "paceline verify" in said
    assert unlike(loss, output, batch, 1) == ""


@dataclass
class Opaque:
    """What nobody knows how to cut."""

    mean: Tensor


@pytest.mark.parametrize(
    ("loss", "output", "target"),
    [
        (F.cross_entropy, A, CLASSES),
        (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), A, CLASSES),
        (partial(F.cross_entropy, weight=WEIGHT), A, CLASSES),
        (F.mse_loss, A, B),
        (F.mse_loss, A.float(), B.float()),
        (F.mse_loss, A.bfloat16(), B.bfloat16()),
        (nn.HuberLoss(), A, B),
        (partial(F.kl_div, reduction="batchmean", log_target=True), A, B),
        (lambda output, target: F.mse_loss(output, target) + WEIGHT.square().sum(), A, B),
        (lambda output, target: (F.cross_entropy(output, target, reduction="sum"), len(target)), A, CLASSES),
        (lambda output, target: (by_weight(output, target) * WEIGHT[target].sum(), WEIGHT[target].sum()), A, CLASSES),
        (lambda output, target: {"a": F.mse_loss(output, target), "b": output.abs().mean()}, A, B),
        (lambda output, target: F.triplet_margin_loss(*output), (A, B, A + 1), CLASSES),
        (lambda output, batch: F.mse_loss(output["a"], batch["x"]), {"a": B}, {"x": A}),
        (lambda output, target: output.mean() * 0.0, A, B),
        (lambda output, target: (output * torch.rand(())).sum(), A, B),  # it draws: nothing can be said
        (lambda output, target: (output.mean - target).sum(), Opaque(A), B),
        (lambda output, target: (output[0] - target).square().sum() + output[1], (A, torch.tensor(1.0)), B),
        (lambda output, target: (output - target.T).square().sum(), A.T, B),  # samples do not come first
        (lambda output, target: 1 / 0 if len(target) < ROWS else (output - target).square().sum(), A, B),
    ],
)  # fmt: skip
def test_no_false_alarm(loss, output, target):
    batch = target if isinstance(target, dict) else (A, target)
    for rows in (ROWS, None):
        assert unlike(loss, output, batch, rows) == ""


def test_what_other_threads_draw_meanwhile_stays_drawn():
    torch.manual_seed(0)
    wanted = [torch.rand(()) for _ in range(6)]
    torch.manual_seed(0)
    drawn = []

    def loss(output, target):
        loader = threading.Thread(target=lambda: drawn.append(torch.rand(())))
        loader.start()
        loader.join()
        return F.cross_entropy(output, target)

    unlike(loss, A, CLASSES, None)
    assert drawn
    assert [*drawn, *(torch.rand(()) for _ in range(6 - len(drawn)))] == wanted


def test_looking_leaves_no_trace():
    calls = 0

    def counting(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (output - target).square().sum()

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.seen += 1
            return (output - target).square().sum()

    running, state = Running(), torch.get_rng_state()
    assert unlike(counting, A, (A, B), ROWS) == ""
    assert calls == 0
    assert unlike(running, A, (A, B), ROWS)
    assert running.seen == 0
    assert unlike(lambda output, target: running(output, target) * torch.rand(()), A, (A, B), ROWS) == ""
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_compares_by_itself():
    assert "logits_per_image" in unlike(None, {"loss": A.sum(), f"{SCORES}image": A}, {"x": A}, ROWS)
    assert unlike(None, {"loss": A.sum(), "logits": A}, {"x": A}, ROWS) == ""


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_looked_at_in_the_first_step_alone(accumulate, monkeypatch):
    looked = []
    monkeypatch.setattr(sequential, "unlike", lambda *given: looked.append(unlike(*given)) or "said")
    data = [nodes.rows(24, seed) for seed in range(3)]

    def train(known: bool) -> Any:
        def work(link: Any) -> Any:
            engine = sequential.Engine()
            engine.accumulate, engine._parts_checked = accumulate, known
            rank = nodes.Rank(link, nodes.build(), engine=engine)
            rank.train(data)
            return rank.state(), engine.hint

        return ranks.run(2, work)

    watched = train(False)
    assert looked == ["", ""]  # once in each process
    assert [hint for _, hint in watched] == ["said"] * 2
    plain = train(True)
    assert len(looked) == 2
    for (one, _), (other, _) in zip(plain, watched, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
