"""Nodes that each update a part of the weights train as one process does, and the state of all parts is that of one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks
from nodes import HIDDEN, MODELS, OPTIMIZERS, Plain, Rank, Wide, build, gap, reference, rows
from paceline.engine.node.optimizer_shards import ELEMENTWISE
from paceline.exchange.flow.costs import ring
from paceline.link.memory import world
from paceline.messages import ALL_GATHER, REDUCE_SCATTER, SHIFT
from paceline.step.average import average

DATA = [rows(24, seed) for seed in range(5)]
CLOSE = 1e-12
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


def odd_data():
    dice = torch.Generator().manual_seed(1)
    return [
        (torch.randn(24, 48, generator=dice, dtype=torch.float64), torch.randint(0, 5, (24,), generator=dice))
        for _ in range(4)
    ]


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
    data = DATA + [rows(24, seed) for seed in range(5, 10)]
    want, _ = reference(build(Plain), data, ANY["nesterov"], clip)
    check(ranks.run(size, lambda link: train(link, build(Plain), ANY["nesterov"], data, clip=clip).state()), want)


@pytest.mark.parametrize("kind", MODELS)
def test_every_model(kind):
    model = build(MODELS[kind])
    want, _ = reference(model, DATA, OPTIMIZERS["adamw"])
    check(ranks.run(3, lambda link: train(link, model, OPTIMIZERS["adamw"]).state()), want, CLOSE)


def test_weights_that_are_not_contiguous_and_weights_of_fewer_values_than_nodes():
    data = odd_data()
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
        F.cross_entropy(alone(x), y).backward()
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


class Tiny(nn.Module):
    """Two values: of four nodes, one has no part and no copy of any."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1).double()

    def forward(self, x):
        return self.line(x[:, :1])


def test_a_node_that_has_no_part_of_a_small_model():
    model, data = Tiny(), [(x, x[:, 1:2]) for x, _ in DATA]
    how = {"loss": F.mse_loss, "optimizer": OPTIMIZERS["adam"]}
    want, _ = reference(model, data, **how)
    found = ranks.run(4, lambda link: train(link, model, how["optimizer"], data, loss=F.mse_loss).state())
    check(found, want)


class Mixed(nn.Module):
    """A scalar of another type than all else, in a bucket of its own."""

    def __init__(self):
        super().__init__()
        self.line, self.scale = nn.Linear(HIDDEN, 5).double(), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.line(x) * self.scale


def test_weights_of_two_types():
    dice = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(24, HIDDEN, generator=dice, dtype=torch.float64), torch.randint(0, 5, (24,), generator=dice))
        for _ in range(3)
    ]
    model = Mixed()
    want, _ = reference(model, data)
    for state in ranks.run(3, lambda link: train(link, model, OPTIMIZERS["momentum"], data).state()):
        assert gap({"line.weight": state["line.weight"]}, {"line.weight": want["line.weight"]}) < 1e-6
        assert torch.allclose(state["scale"], want["scale"])


def test_what_a_script_does_to_weights_between_two_steps_stays_also_where_state_is_collected():
    """Story: a part that was no view of its weight was written back when a checkpoint was made."""
    model, data = Odd(), odd_data()

    def halved(made):
        with torch.no_grad():
            made.conv.weight.mul_(0.5)
            made.scale.data = made.scale.data * 0.5

    def work(link):
        rank = train(link, model, OPTIMIZERS["momentum"], data[:2])
        halved(rank.model)
        before = rank.state()
        average(rank.run, state=True)
        assert all(torch.equal(value, before[name]) for name, value in rank.state().items())
        rank.train(data[2:])
        return rank.state()

    plain = copy.deepcopy(model)
    optimizer = OPTIMIZERS["momentum"](plain.parameters())
    for number, (x, y) in enumerate(data):
        if number == 2:
            halved(plain)
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    check(ranks.run(3, work), plain.state_dict())


def test_to_collect_the_state_each_node_sends_its_part_alone():
    def work(link):
        rank = train(link, build(Plain), OPTIMIZERS["adam"])
        sent, gather = [], link.all_gather
        link.all_gather = lambda tensor, *given, **more: sent.append(tensor.nbytes) or gather(tensor, *given, **more)
        average(rank.run, state=True)
        return sum(sent) / sum(3 * weight.nbytes for weight in rank.engine.weights)  # values and two averages

    assert ranks.run(4, work) == pytest.approx([0.25] * 4, rel=0.2)


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.nothing = nn.Linear(HIDDEN, 3).double(), nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, x):
        return self.line(x) + self.nothing.sum()


def test_a_parameter_without_values_keeps_its_state():
    dice = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, HIDDEN, generator=dice, dtype=torch.float64), torch.randint(0, 3, (24,), generator=dice)

    def work(link):
        rank = train(link, Empty(), ANY["Adagrad"], [(x, y)] * 2)
        average(rank.run, state=True)
        rank.train([(x, y)])
        average(rank.run, state=True)
        return len(rank.optimizer.state_dict()["state"])

    assert ranks.run(2, work) == [3, 3]


def test_after_an_error_the_optimizer_has_the_parameters_again():
    def work(link):
        rank = train(link, build(Plain), OPTIMIZERS["momentum"])
        rank.exchange.close()
        assert rank.optimizer.param_groups[0]["params"] == list(rank.model.parameters())
        return len(rank.optimizer.state_dict()["state"])

    assert ranks.run(2, work) == [0, 0]


@pytest.mark.parametrize("before", [False, True])
def test_an_interrupt_while_weights_are_collected_is_remembered_and_a_collection_forgets_none(before):
    """Story: a checkpoint after an interrupted step would have let the next step begin."""

    def interrupted(*given):
        raise KeyboardInterrupt

    def work(link):
        rank = train(link, build(Plain), OPTIMIZERS["momentum"])
        rank.run.interrupted = before
        average(rank.run, state=True)
        after = rank.run.interrupted
        rank.exchange.average = interrupted
        with pytest.raises(KeyboardInterrupt):
            average(rank.run)
        return after, rank.run.interrupted

    assert ranks.run(2, work) == [(before, True)] * 2


def test_step_hooks_would_see_parts_and_are_refused():
    def hooked(parameters):
        made = torch.optim.SGD(parameters, lr=0.1)
        made.register_step_post_hook(lambda *_: None)
        return made

    with pytest.raises(ValueError, match="optimizer SGD has step hooks, which would see parts of weights"):
        Rank(world(1)[0], build(Plain), hooked, exchange="server")


def test_an_optimizer_that_may_need_whole_weights_is_refused_by_name():
    with pytest.raises(ValueError, match="optimizer LARS may need whole weights for an update"):
        Rank(world(1)[0], build(Plain), OPTIMIZERS["lars"], exchange="server")


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_a_step_sends(size):
    """(2 N - 1) / N n on rings: a reduce-scatter, a copy of the sum of one part, and of more than two an all-gather of
    new weights: two have updated all of them."""

    def work(link):
        rank = train(link, build(Wide), OPTIMIZERS["momentum"])
        lane = rank.exchange._lane
        before = lane.sent_bytes
        rank.train(DATA)
        whole = sum(weight.nbytes for weight in rank.engine.weights)
        rounds = [(REDUCE_SCATTER, whole), (SHIFT, whole / size), (ALL_GATHER, whole / size)]
        rounds = rounds[: 2 if size == 2 else 3]
        declared, on_rings = (sum(cost(*each).bytes for each in rounds) for cost in (link.cost, ring(size)))
        return (lane.sent_bytes - before) / len(DATA) / declared, on_rings / whole

    for sent, on_rings in ranks.run(size, work):
        assert sent == pytest.approx(1, rel=0.01), "parts are padded"
        assert on_rings == pytest.approx(1 if size == 2 else (2 * size - 1) / size)
