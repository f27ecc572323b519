"""Gradients, factors and inputs that lie in the same memory count as those of plain PyTorch do, which never adds up."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.module_tracker import ModuleTracker

import ranks
from device import DEVICE
from nodes import HIDDEN, IN, OPTIMIZERS, OUT, Rank, build, gap, reference, rows
from paceline.engine.compute.gradient_hooks import ALONE_BYTES, Backward
from paceline.engine.compute.optimizer_step import Factored, separate
from paceline.engine.sequential import Engine
from paceline.link.memory import world
from paceline.messages import DENSE, FACTORS

EXACT = 1e-12  # float64, a few steps: only the order of additions differs
TIMES = 3  # words of a row


def words(x):
    return torch.stack([x.roll(i, 1) for i in range(TIMES)], 1)


class Positioned(nn.Module):
    """With one row, the positions' gradient and that of the layer's output are the same one."""

    def __init__(self):
        super().__init__()
        self.first, self.place = nn.Linear(IN, HIDDEN), nn.Parameter(torch.randn(TIMES, HIDDEN))
        self.head = nn.Linear(HIDDEN, OUT)

    def forward(self, x):
        return self.head(F.relu(self.first(words(x)) + self.place[None]))


class Two(Positioned):
    """Two parameters get the same gradient, in one memory, with any number of rows."""

    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(torch.randn(TIMES, HIDDEN))

    def forward(self, x):
        return self.head(F.relu(self.first(words(x)) + (self.place[None] + self.other[None])))


class Workspace(Positioned):
    """The layer reads from memory that the next pass fills anew."""

    def forward(self, x):
        if getattr(self, "space", None) is None or len(self.space) != len(x):
            self.space = x.new_empty(len(x), TIMES, IN)
        self.space.copy_(words(x))
        return self.head(F.relu(self.first(self.space)))


class InPlace(Positioned):
    """It changes its input, and uses a weight outside of its layer, which is why the first step is computed again."""

    def forward(self, x):
        x -= 0.5
        return super().forward(x) + 1e-3 * self.first.weight.square().sum()


def by_word(output, target):
    """(sum, weight): the mean is over more than rows."""
    return F.cross_entropy(
        output.flatten(0, 1), target.repeat_interleave(TIMES), reduction="sum"
    ), target.numel() * TIMES


def some(count, rows_each):
    return [tuple(part.clone() for part in rows(rows_each, seed)) for seed in range(count)]


@pytest.mark.parametrize("kind", [Positioned, Two, Workspace])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("size", [1, 2])
def test_it_trains_as_plain_pytorch_does(kind, accumulate, num_rows, size):
    """Story: factors of one micro-batch were written over by the next, and gradients in one memory scaled twice."""
    model = build(kind)
    data = some(3, num_rows * size)

    def work(link):
        engine = Engine()
        engine.accumulate = accumulate
        rank = Rank(link, model, OPTIMIZERS["sgd"], loss=by_word, batch=num_rows * size, engine=engine)
        rank.train(data)
        return rank.state(), rank.exchange.forms()

    want, _ = reference(model, data, OPTIMIZERS["sgd"], loss=by_word)
    for state, forms in ranks.run(size, work):
        assert gap(state, want) < EXACT
        assert FACTORS in forms


def test_each_gradient_that_is_added_up_in_place_has_its_own_memory():
    wide = ALONE_BYTES // 8
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(wide, dtype=torch.float64)) for name in "ab"})
    backward, gradients = Backward(model), []
    (model["a"] + model["b"]).sum().backward()
    one = torch.ones(wide, dtype=torch.float64)
    for parameter in model.values():
        parameter.grad = one.view(-1)
    backward.take([DENSE] * len(backward.buckets), gradients.append)
    assert len(gradients) == 2
    for sent in gradients:
        sent.flat.add_(1)
    assert [float(sent.flat[0]) for sent in gradients] == [2.0, 2.0]
    backward.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_is_computed_again_has_the_input_of_the_first_attempt(size):
    """Story: it was computed on what the first attempt had made of its input."""
    model, data = build(InPlace), some(3, 8)

    def work(link):
        mine = [tuple(part.clone() for part in batch) for batch in data]
        rank = Rank(link, model, OPTIMIZERS["sgd"], loss=by_word, batch=8)
        calls = []
        gradient = rank.engine.gradient
        rank.engine.gradient = lambda *given: calls.append(1) or gradient(*given)
        rank.train(mine)
        return rank.state(), len(calls), mine

    found = ranks.run(size, work)
    want, _ = reference(
        model, [tuple(part.clone() for part in batch) for batch in data], OPTIMIZERS["sgd"], loss=by_word
    )
    for state, num_calls, _ in found:
        assert gap(state, want) < EXACT
        assert num_calls == len(data) + 1, "the first step was not computed again"
    for mine, batch in zip(found[0][2], data, strict=True):
        assert torch.equal(mine[0][: 8 // size], batch[0][: 8 // size] - 0.5), "as a plain loop leaves it"


def test_an_input_that_is_changed_for_the_first_time_in_a_step_to_be_computed_again_is_told():
    class Later(Positioned):
        late = False

        def forward(self, x):
            if self.late:
                x -= 0.5
            return super().forward(x)

    rank = Rank(world(1)[0], build(Later), OPTIMIZERS["sgd"], loss=by_word, batch=4)
    rank.train(some(1, 4))
    kept, rank.model.late = rank.engine.snapshot(), True
    data = some(1, 4)[0]
    rank.engine.gradient(data, 0.25, rank.exchange.forms(), lambda sent: None)
    rank.engine.rollback(kept)
    for _ in range(2):
        with pytest.raises(ValueError, match="changed its input in place, which it had not done in the steps before"):
            rank.engine.gradient(data, 0.25, rank.exchange.forms(), lambda sent: None)
    rank.engine.gradient(some(1, 4)[0], 0.25, rank.exchange.forms(), lambda sent: None)  # another batch may come


def test_a_gradient_that_holds_a_layers_factor_in_its_memory_is_parted():
    """Whichever begins first."""
    memory = torch.ones(4, 8)
    whole, inside = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(3, 8))
    whole.grad, left = memory, memory[1:]
    separate([whole], [Factored(inside, left, torch.ones(3, 8))])
    whole.grad.mul_(2.0)
    assert torch.equal(left, torch.ones(3, 8))


def test_a_tracker_of_torchs_own_sends_no_layer_dense():
    rank = Rank(world(1)[0], build(Positioned), OPTIMIZERS["sgd"], loss=by_word, batch=4)
    with ModuleTracker():
        rank.train(some(2, 4))
    assert FACTORS in rank.exchange.forms()


def test_copies_of_a_layer_and_tables_without_hooks_still_compute():
    rank = Rank(world(1)[0], build(Positioned), OPTIMIZERS["sgd"], loss=by_word, batch=4)
    rank.train(some(1, 4))
    x = torch.ones(2, IN, dtype=torch.float64, device=DEVICE)
    assert torch.equal(copy.copy(rank.model.first)(x), rank.model.first(x))
    rank.model.first._forward_hooks.clear()
    rank.train(some(1, 4))
