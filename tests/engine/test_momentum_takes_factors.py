"""SGD that takes a layer's factors is SGD: same weights, same state, and no tensor as large as a weight on the way."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks
from device import of_cpus
from nodes import HIDDEN, IN, MODELS, OUT, Plain, Rank, build, engine_of, gap, reference, rows
from paceline.engine.compute import optimizer_step
from paceline.engine.compute.optimizer_step import optimizer_takes_factors
from paceline.engine.sequential import Engine
from paceline.link.memory import world
from paceline.messages import DENSE, FACTORS

BATCHES = [rows(24, seed) for seed in range(4)] + [rows(7, 4)]
SGD = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.1},
    "dampening": {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "nesterov and decay": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "uphill": {"momentum": 0.9, "maximize": True, "weight_decay": 0.1},
    "lr in a tensor": {"momentum": 0.9, "lr": torch.tensor(0.1)},
    "fused": {"momentum": 0.9, "fused": True, "weight_decay": 0.1},
}


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1, **options})


def alone(model, optimizer, batches=BATCHES, **options):
    """(rank after training by itself, losses)."""
    rank = Rank(world(1)[0], model, optimizer, **options)
    return rank, rank.train(batches)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("options", SGD.values(), ids=SGD)
def test_one_process_equals_torch(options, clip, kind):
    model = build(MODELS[kind])
    rank, losses = alone(model, sgd(**options), clip=clip)
    want, want_losses = reference(model, BATCHES, sgd(**options), clip)
    assert gap(rank.state(), want) < 1e-12
    assert losses == pytest.approx(want_losses, rel=1e-12)
    assert rank.exchange.forms().count(FACTORS) == {"tied": 0, "repeated": 0, "sometimes": 4}.get(kind, 2)


def test_a_gpu_alone_takes_gradients(monkeypatch):
    """It multiplies in 16 bits under autocast, and factors of one node are sent to nobody."""
    monkeypatch.setattr(optimizer_step, "takes_gradients", lambda model: True)
    model = build()
    rank, losses = alone(model, sgd(**SGD["nesterov"]))
    want, want_losses = reference(model, BATCHES, sgd(**SGD["nesterov"]))
    assert gap(rank.state(), want) < 1e-12
    assert losses == pytest.approx(want_losses, rel=1e-12)
    assert set(rank.exchange.forms()) == {DENSE}


def test_groups_and_their_states_are_torchs():
    def optimizer(parameters):
        first, *rest = list(parameters)
        return torch.optim.SGD(
            [{"params": [first], "lr": 0.3, "momentum": 0.5}, {"params": rest, "nesterov": True}], 0.1, 0.9
        )

    model = build()
    rank, _ = alone(model, optimizer)
    plain = copy.deepcopy(model)
    own = optimizer(plain.parameters())
    for x, y in BATCHES:
        own.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        own.step()
    assert gap(rank.state(), plain.state_dict()) < 1e-12
    mine, theirs = rank.optimizer.state_dict(), own.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for index, state in theirs["state"].items():
        assert torch.allclose(mine["state"][index]["momentum_buffer"], state["momentum_buffer"], rtol=1e-11, atol=1e-14)
    rank.optimizer.load_state_dict(copy.deepcopy(theirs))  # and goes on from torch's own state
    rank.train(BATCHES)
    for x, y in BATCHES:
        own.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        own.step()
    assert gap(rank.state(), plain.state_dict()) < 1e-12


def test_sequences():
    """Inputs (n, t, d): every token is a row."""

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)

        def forward(self, x):
            return self.head(F.relu(self.first(x.view(len(x), 1, IN).expand(-1, 2, -1))).mean(1))

    model = build(Steps)
    rank, _ = alone(model, sgd(momentum=0.9))
    want, _ = reference(model, BATCHES, sgd(momentum=0.9))
    assert gap(rank.state(), want) < 1e-12
    assert rank.exchange.forms().count(FACTORS) == 1


def test_more_rows_than_a_gradient_go_dense_and_nothing_is_redone():
    model, batches = build(), [rows(70, 1), rows(70, 2)]
    seen = []
    rank, _ = alone(model, sgd(momentum=0.9), batches, batch=2, rejoin=seen.append)
    want, _ = reference(model, batches, sgd(momentum=0.9))
    assert gap(rank.state(), want) < 1e-12
    assert FACTORS not in rank.exchange.forms()
    assert not seen


def hooked(model, optimizer):
    model.first.weight.register_hook(lambda gradient: gradient * 0.5)


def watched(model, optimizer):
    def halve(*_):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)


@pytest.mark.parametrize("hook", [hooked, watched])
def test_a_hook_that_wants_the_gradient_gets_it(hook):
    model = build()
    rank = Rank(world(1)[0], model, sgd(momentum=0.9))
    plain = copy.deepcopy(model)
    own = sgd(momentum=0.9)(plain.parameters())
    hook(rank.model, rank.optimizer)
    hook(plain, own)
    rank.train(BATCHES)
    for x, y in BATCHES:
        own.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        own.step()
    assert gap(rank.state(), plain.state_dict()) < 1e-12


@pytest.mark.parametrize(
    ("optimizer", "takes"),
    [(sgd(), True), (sgd(differentiable=True), False), (torch.optim.Adam, False), (torch.optim.AdamW, False)],
)
def test_other_optimizers_get_their_gradient(optimizer, takes):
    rank = Rank(world(1)[0], build(), optimizer)
    assert optimizer_takes_factors(rank.optimizer) == rank.engine.optimizer_takes_factors == takes
    assert (FACTORS in rank.exchange.forms()) == takes


def allocations(step):
    """The largest tensor in bytes that any operation of a step makes."""
    with torch.profiler.profile(profile_memory=True) as seen:
        step()
    return max(event.self_cpu_memory_usage for event in seen.events())


class Wide(nn.Module):
    """One layer far larger than anything else in a step of a few rows."""

    def __init__(self):
        super().__init__()
        self.wide, self.head = nn.Linear(1024, 8192), nn.Linear(8192, OUT)

    def forward(self, x):
        return self.head(F.relu(self.wide(x)))


@of_cpus
@pytest.mark.parametrize("clip", [None, 0.01])
def test_no_gradient_of_the_weight_exists(clip):
    x, y = torch.randn(8, 1024), torch.zeros(8, dtype=torch.int64)
    rank, _ = alone(build(Wide, torch.float32), sgd(momentum=0.9, weight_decay=0.1), [(x, y)], clip=clip, batch=8)
    assert allocations(lambda: rank.train([(x, y)])) < rank.model.wide.weight.nbytes / 10
    assert rank.model.wide.weight.grad is None
    assert rank.model.head.weight.grad is not None
    dense, _ = alone(build(Wide, torch.float32), torch.optim.Adam, [(x, y)], clip=clip, batch=8)
    assert allocations(lambda: dense.train([(x, y)])) >= rank.model.wide.weight.nbytes


def test_a_product_for_another_optimizer_is_made_in_the_same_place_each_step():
    """Two nodes send factors; Adam needs them multiplied."""

    def work(link):
        rank = Rank(link, build(), torch.optim.Adam)
        places = []
        for data in BATCHES:
            rank.train([data])
            places.append(rank.model.first.weight.grad.data_ptr())
        return places

    for places in ranks.run(2, work):
        assert len(set(places)) == 1


def test_an_optimizer_that_steps_by_closure_is_refused():
    model = build(Plain)
    with pytest.raises(ValueError, match=r"LBFGS .*closure.*SGD or Adam"):
        Engine().open(model, torch.optim.LBFGS(model.parameters()), F.cross_entropy)


def test_forms_at_one_rank_follow_the_optimizer_alone():
    for absorbs, form in ((True, FACTORS), (False, DENSE)):
        rank = Rank(world(1)[0], build())
        engine = engine_of(rank.engine.buckets, optimizer_takes_factors=absorbs)
        rank.exchange.open(engine, world(1)[0], rank.exchange.codec, 24)
        linear = {f for bucket, f in zip(rank.engine.buckets, rank.exchange.forms(), strict=True) if bucket.linear}
        assert linear == {form}
