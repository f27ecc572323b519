"""Nodes that each update a part of the weights train as one process does, and the state of all parts is that of one."""

import copy

import pytest
import torch
from torch import nn

import ranks
from nodes import MODELS, OPTIMIZERS, Plain, Rank, build, gap, reference, rows
from paceline.engine.node.optimizer_shards import ELEMENTWISE
from paceline.link.memory import world
from paceline.messages import Bucket, CommCost
from paceline.registry import parse
from paceline.step.average import average

DATA = [rows(24, seed) for seed in range(5)]
CLOSE = 1e-11  # Adam divides by small numbers
ANY = {name: lambda p, name=name: getattr(torch.optim, name)(p, lr=0.01) for name in ELEMENTWISE}
ANY |= {name: made for name, made in OPTIMIZERS.items() if name != "lars"}
ANY["amsgrad"] = lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True)
ANY["centered"] = lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9)
ANY["groups"] = lambda p: torch.optim.SGD([{"params": [each], "lr": 0.1 / (i + 1)} for i, each in enumerate(p)])


class Odd(nn.Module):
    """A convolution whose weights are not contiguous, a scalar, and a weight of fewer values than nodes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).double().to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return self.conv(x.view(len(x), 3, 4, 4)).amax((2, 3)) * self.scale + self.shift * torch.arange(5)


def train(link, model, optimizer, data=DATA, **how):
    rank = Rank(link, model, optimizer, exchange="server", **how)
    rank.train(data)
    return rank


def check(found, want, limit=1e-12):
    for state in found:
        assert gap(state, want) < limit
        assert all(torch.equal(state[name], found[0][name]) for name in state)


@pytest.mark.parametrize("optimizer", ANY)
def test_every_elementwise_optimizer(optimizer):
    want, _ = reference(build(Plain), DATA, ANY[optimizer], 0.05)
    check(ranks.run(3, lambda link: train(link, build(Plain), ANY[optimizer], clip=0.05).state()), want, CLOSE)


@pytest.mark.parametrize(("size", "clip"), [(1, 0.05), (2, None), (5, None)])
def test_every_number_of_nodes(size, clip):
    want, _ = reference(build(Plain), DATA, ANY["nesterov"], clip)
    check(ranks.run(size, lambda link: train(link, build(Plain), ANY["nesterov"], clip=clip).state()), want)


@pytest.mark.parametrize("kind", MODELS)
def test_every_model(kind):
    model = build(MODELS[kind])
    want, _ = reference(model, DATA, OPTIMIZERS["adamw"])
    check(ranks.run(3, lambda link: train(link, model, OPTIMIZERS["adamw"]).state()), want, CLOSE)


def test_weights_that_are_not_contiguous_and_weights_of_fewer_values_than_nodes():
    dice = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(24, 48, generator=dice, dtype=torch.float64), torch.randint(0, 5, (24,), generator=dice))
        for _ in range(4)
    ]
    model = Odd()
    want, _ = reference(model, data, OPTIMIZERS["adamw"])

    def work(link):
        rank = train(link, model, OPTIMIZERS["adamw"], data)
        average(rank.run, state=True)
        states = rank.optimizer.state_dict()["state"]
        assert states[2]["exp_avg"].stride() == rank.model.conv.weight.stride()
        return rank.state()

    check(ranks.run(4, work), want)


def test_of_unlike_shares_some_nodes_have_no_rows():
    want, _ = reference(build(Plain), DATA)
    found = ranks.run(3, lambda link: train(link, build(Plain), OPTIMIZERS["momentum"], shares=(0, 1, 3)).state())
    check(found, want)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "last", "Adagrad", "NAdam"])
def test_the_assembled_state_is_that_of_one_process_and_training_goes_on_from_it(optimizer):
    model = build(Plain)
    alone = copy.deepcopy(model)
    one = ANY[optimizer](alone.parameters())
    for x, y in DATA[:3]:
        alone.zero_grad()
        nn.functional.cross_entropy(alone(x), y).backward()
        one.step()
    whole = one.state_dict()["state"]

    def work(link):
        rank = train(link, model, ANY[optimizer], DATA[:3])
        average(rank.run, state=True)
        kept = copy.deepcopy(rank.optimizer.state_dict())
        rank.train(DATA[3:])
        return rank.state(), kept

    want, _ = reference(model, DATA, ANY[optimizer])
    found = ranks.run(3, work)
    check([state for state, _ in found], want, CLOSE)
    for _, kept in found:
        assert kept["state"].keys() == whole.keys()
        for number, state in kept["state"].items():
            assert state.keys() == whole[number].keys()
            for key, value in state.items():
                assert (value - whole[number][key]).norm() <= CLOSE * whole[number][key].norm()


def test_a_node_has_the_state_of_its_part_and_of_one_copy():
    def work(link):
        rank = train(link, build(Plain), OPTIMIZERS["adam"])
        weights = sum(weight.numel() for weight in rank.engine.weights)
        return sum(state["exp_avg"].numel() for state in rank.optimizer.state.values()) / weights

    assert ranks.run(4, work) == pytest.approx([0.5] * 4, rel=0.01)


def test_between_two_steps_the_state_is_nobodys():
    def work(link):
        rank = train(link, build(Plain), OPTIMIZERS["momentum"])
        with pytest.raises(
            RuntimeError, match=r"each node has a part of the state; pace\.save\(folder\) saves all of it"
        ):
            rank.optimizer.state_dict()
        with pytest.raises(RuntimeError, match=r"load it before join\(\), or call pace\.restore\(folder\)"):
            rank.optimizer.load_state_dict({"state": {}, "param_groups": []})
        with pytest.raises(ValueError, match=r"a parameter group was added after join\(\)"):
            rank.optimizer.add_param_group({"params": [torch.zeros(1)]})
        average(rank.run, state=True)
        state = rank.optimizer.state_dict()
        rank.engine.load_optimizer_state(state)
        return len(state["state"])

    assert len(set(ranks.run(2, work))) == 1


def test_an_optimizer_that_may_need_whole_weights_is_refused_by_name():
    with pytest.raises(ValueError, match="optimizer LARS may need whole weights for an update"):
        Rank(world(1)[0], build(Plain), OPTIMIZERS["lars"], exchange="server")


@pytest.mark.parametrize("size", [2, 3, 8])
def test_it_sends_what_it_says(size):
    """(2 N - 1) / N n: a reduce-scatter, a copy of the sum of one part, an all-gather of new weights."""
    (link,) = world(1)
    bucket = Bucket(0, ("a", "b"), ((size * 100, 3), (size * 2,)))
    rank = Rank(link, build(Plain), OPTIMIZERS["sgd"], exchange="server")
    cost = rank.exchange.cost([bucket], 1, size)
    assert cost == CommCost(2 * (size - 1) + 1, (2 * size - 1) / size * 4 * bucket.numel)
    assert parse("exchange", "server").divides_optimizer
