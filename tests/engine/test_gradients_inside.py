"""What a model does with gradients, parameters and inputs inside its own forward changes no step."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks
from device import DEVICE
from nodes import HIDDEN, IN, OUT, Plain, Rank, build, gap, reference, rows
from nodes import Whole as Batch
from paceline.exchange.allreduce import Exchange
from paceline.messages import FACTORS

BATCHES = [rows(24, seed) for seed in range(4)]


class Attacked(Plain):
    """Inputs are moved against the model by a gradient of its own."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).square().sum(), x)
        return super().forward(x + 0.1 * slope.sign())


class Penalised(Plain):
    """What is learned holds a gradient, which is differentiated again."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        out = super().forward(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out + F.pad(slope.square().sum(1, keepdim=True), (0, OUT - 1))


class Latent(nn.Module):
    """A layer that reads a parameter, and one that reads part of another."""

    def __init__(self):
        super().__init__()
        self.z, self.first, self.head = nn.Parameter(torch.randn(2, IN)), nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.into, self.other = nn.Linear(IN, HIDDEN), nn.Linear(IN, HIDDEN)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x) + self.into(self.z[:1]) * self.other(self.z[1:])))


class Sharp(Plain):
    """How steep it is in a weight says how much of its output counts."""

    def forward(self, x):
        out = super().forward(x.new_ones(1, IN))
        (slope,) = torch.autograd.grad(out.square().sum(), self.first.weight, allow_unused=True)
        return super().forward(x) * (1 + slope.square().mean())


class Masked(Plain):
    """A layer is used with another weight, made of its own."""

    def forward(self, x):
        weight = self.first.weight
        first = torch.func.functional_call(self.first, {"weight": weight * (weight > 0)}, (x,))
        return self.head(F.relu(self.second(F.relu(first))))


class Mapped(Plain):
    """Row by row, by a transform."""

    def forward(self, x):
        return torch.func.vmap(super().forward)(x)


class Curved(Plain):
    """A transform's gradient, by the input."""

    def forward(self, x):
        slopes = torch.func.vmap(torch.func.grad(lambda row: super(Curved, self).forward(row).square().sum()))(x)
        return super().forward(x) + slopes.square().sum(1, keepdim=True)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", [Attacked, Penalised, Latent, Sharp, Masked, Mapped, Curved])
def test_training_is_that_of_plain_torch(kind, size):
    """Story: a gradient inside forward was taken for the step's, and a weight was multiplied out after its update."""
    model = build(kind)

    def work(link):
        rank = Rank(link, model)
        losses, forms = rank.train(BATCHES), list(rank.exchange.forms())
        rank.exchange.close()
        return losses, rank.state(), forms

    want, want_losses = reference(model, BATCHES)
    for losses, state, forms in ranks.run(size, work):
        assert losses == pytest.approx(want_losses, rel=1e-11)
        assert gap(state, want) < 1e-11
        assert (FACTORS in forms) == (kind not in (Penalised, Mapped, Curved)), "no product of factors"


def test_complex_layers_travel_dense():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)
            self.turn = nn.Linear(HIDDEN, HIDDEN, dtype=torch.complex128)

        def forward(self, x):
            return self.head(self.turn(self.layer(x) + 0j).abs())

    torch.manual_seed(7)
    model = Complex().to(DEVICE)
    model.layer.double(), model.head.double()

    def work(link):
        rank = Rank(link, model)
        rank.train(BATCHES)
        return rank.state()

    want, _ = reference(model, BATCHES)
    (state,) = ranks.run(1, work)
    assert all(torch.allclose(state[name], want[name], rtol=1e-11) for name in want)


class Held(Exchange):
    """Pieces leave once the gate is open."""

    def _send(self, pieces, flight):
        assert self.gate.wait(20)
        return super()._send(pieces, flight)


def test_an_input_that_is_filled_anew_after_the_step_leaves_as_it_was():
    model = build()

    def work(link):
        exchange = Held(FACTORS)
        exchange.overlap, exchange.gate = "forward", threading.Event()
        rank, data = Rank(link, model, exchange=exchange), [part.clone() for part in BATCHES[0]]
        rank.step(Batch(data))
        data[0].fill_(9.0)
        exchange.gate.set()
        rank.engine.wait_pending()
        exchange.close()
        return rank.state()

    want, _ = reference(model, BATCHES[:1])
    for state in ranks.run(2, work):
        assert gap(state, want) < 1e-12
