"""Replicas in threads are one model: its weights, its buffers, one gradient, and the same masks for the same seed."""

import os
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import paceline
import ranks
from device import DEVICE, of_cpus
from nodes import MODELS, OPTIMIZERS, Conv, Plain, Rank, build, gap, reference, rows
from paceline.engine.compute.batch import split
from paceline.engine.compute.rng import DRAWS, ThreadRng
from paceline.engine.replicas import Engine, twin
from paceline.link.memory import world

BATCHES = [rows(21, seed) for seed in range(3)] + [rows(2, 3)]


def train(model, size=3, batches=BATCHES, link=None, **options):
    rank = Rank(link or world(1)[0], model, engine=Engine(size), **options)
    try:
        losses = rank.train(batches)
    finally:
        rank.engine.close()
    return rank, losses


CASES = [(kind, optimizer, None) for kind in MODELS if kind != "plain" for optimizer in ("momentum", "adamw")]
CASES += [("plain", optimizer, 0.05) for optimizer in OPTIMIZERS if optimizer not in ("momentum", "adamw")]


@pytest.mark.parametrize(("kind", "optimizer", "clip"), CASES)
def test_replicas_equal_one_process(kind, optimizer, clip):
    """Three replicas, of which one has no rows in the last batch, of two."""
    model = build(MODELS[kind])
    want, losses = reference(model, BATCHES, OPTIMIZERS[optimizer], clip)
    rank, got = train(model, 3, optimizer=OPTIMIZERS[optimizer], clip=clip)
    assert gap(rank.state(), want) < 1e-11
    assert got == pytest.approx(losses, rel=1e-12)


def test_two_nodes_of_replicas_equal_one_process():
    model = build()
    want, _ = reference(model, BATCHES)

    def work(link):
        rank, _ = train(model, 2, link=link)
        forms = rank.exchange.forms()
        rank.exchange.close()
        return rank.state(), forms.count("factors")

    for state, num_factors in ranks.run(2, work):
        assert gap(state, want) < 1e-11
        assert num_factors == 2


def test_weights_are_shared_and_gradients_are_not():
    model = build()
    other = twin(model, 1)
    for (name, own), (same, its) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert name == same
        assert own is not its
        assert own.data_ptr() == its.data_ptr()
    tied = twin(build(MODELS["tied"]), 1)
    assert tied.again.weight is tied.second.weight


def test_buffers_mode_and_frozen_weights_are_the_models():
    model = build(Conv)
    rank = Rank(world(1)[0], model, engine=Engine(2))
    rank.model.norm.running_mean.fill_(3.0)
    rank.model.eval()
    rank.model.conv.weight.data = rank.model.conv.weight.data.clone()
    rank.model.temperature, rank.model.norm.momentum = 0.5, None
    rank.engine._follow()
    other = rank.engine.twins[0].model
    assert not any(module.training for module in other.modules())
    assert torch.equal(other.norm.running_mean, rank.model.norm.running_mean)
    assert (other.temperature, other.norm.momentum) == (0.5, None)
    assert other.conv.weight.data_ptr() == rank.model.conv.weight.data_ptr()
    rank.engine.close()


def test_dice_are_a_threads_own_and_leave_the_others_as_they_were():
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    with ThreadRng(5):
        one = F.dropout(torch.ones(1000), 0.5), torch.rand(3)
    assert torch.equal(torch.rand(4), want)
    with ThreadRng(5):
        assert torch.equal(F.dropout(torch.ones(1000), 0.5), one[0])
        assert torch.equal(torch.rand(3), one[1])


P = torch.full((8,), 0.5)
IMAGE = torch.arange(64.0).view(1, 1, 8, 8)
DRAWN = {
    "dropout": lambda: F.dropout(torch.ones(64)),
    "dropout in a channel": lambda: F.dropout1d(torch.ones(2, 16, 3)),
    "alpha dropout": lambda: F.alpha_dropout(torch.ones(64), training=True),
    "native dropout": lambda: torch.native_dropout(torch.ones(64), 0.5, True)[0],
    "attention": lambda: F.scaled_dot_product_attention(*[IMAGE] * 3, dropout_p=0.5),
    "rand": lambda: torch.rand(8),
    "rand by its overload": lambda: torch.ops.aten.rand.default([8]),
    "randn_like": lambda: torch.randn_like(P),
    "randint": lambda: torch.randint(1 << 40, (8,)),
    "randperm": lambda: torch.randperm(64),
    "normal_": lambda: torch.empty(8).normal_(),
    "uniform_": lambda: torch.empty(8).uniform_(),
    "kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(8, 8)),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(64), 8),
    "poisson": lambda: torch.poisson(torch.full((64,), 9.0)),
    "gumbel_softmax": lambda: F.gumbel_softmax(P),
    "rrelu": lambda: F.rrelu(-torch.ones(64), training=True),
    "pooling in 2d": lambda: F.fractional_max_pool2d(IMAGE, 2, output_size=3, return_indices=True)[0],
    "pooling in 3d": lambda: F.fractional_max_pool3d(IMAGE.view(1, 4, 4, 4), 2, output_size=2, return_indices=True)[0],
    "Beta": lambda: torch.distributions.Beta(P, P).sample(),
    "Dirichlet": lambda: torch.distributions.Dirichlet(P).sample(),
    "Gamma": lambda: torch.distributions.Gamma(P, P).sample(),
    "StudentT": lambda: torch.distributions.StudentT(P).sample(),
    "LSTM": lambda: nn.LSTM(4, 4, 2, dropout=0.5)(torch.ones(1, 2, 4))[0],
    "seeded": lambda: (torch.manual_seed(9), torch.rand(8))[1],
}


@pytest.mark.parametrize("draw", DRAWN)
def test_every_function_that_draws_draws_from_the_threads_own(draw):
    """Whatever the common generator's state is, which it leaves as it was."""

    def drawn(seed):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with ThreadRng(5):
            found = DRAWN[draw]()
        assert torch.equal(torch.get_rng_state(), before)
        return found

    assert torch.equal(drawn(1), drawn(2))


def test_every_name_that_draws_exists():
    for name in DRAWS:
        assert any(hasattr(room, name) for room in (torch, torch.Tensor, F, torch._VF, nn.init, torch._C._nn)), name


class Masked(nn.Module):
    """A weight of ones, whose gradient adds up to what forward gave: where backward drops what forward dropped."""

    def __init__(self, reentrant):
        super().__init__()
        self.weight, self.reentrant = nn.Parameter(torch.ones(256, dtype=torch.float64)), reentrant

    def part(self, x):
        return F.dropout(x, 0.5) * self.weight

    def forward(self, x):
        if self.reentrant is None:
            return ByHand.apply(self.part, x, self.weight)
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


class ByHand(torch.autograd.Function):
    """As some libraries checkpoint: the state is set, and put back, without `fork_rng`."""

    @staticmethod
    def forward(ctx, part, x, weight):
        ctx.part, ctx.state = part, torch.get_rng_state()
        ctx.save_for_backward(x, weight)
        return part(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            out = ctx.part(x.detach())
        torch.set_rng_state(now)
        return None, None, torch.autograd.grad(out, weight, grad)[0]


@of_cpus
@pytest.mark.parametrize("reentrant", [True, False, None])
def test_segments_that_backward_computes_again_drop_what_forward_dropped(reentrant):
    """Story: of replicas, backward drew other masks than forward had: a wrong gradient, without a word."""
    model = Masked(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with paceline.join(model, optimizer, lambda out, _: out.sum(1).mean(), batch_size=8, engine="replicas:2") as pace:
        for _ in range(3):
            with torch.no_grad():
                model.weight.fill_(1.0)
            given = float(pace.step((torch.ones(8, 256, dtype=torch.float64, requires_grad=True), torch.zeros(8))))
            assert float((1 - model.weight.detach()).sum()) == pytest.approx(given, rel=1e-12)


def test_the_state_of_a_threads_dice_is_read_and_set_as_that_of_all():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with ThreadRng(5):
        begun = torch.get_rng_state()
        want = torch.rand(3)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(begun)
            assert torch.equal(torch.rand(3), want)
        after = torch.rand(3)
        torch.random.set_rng_state(begun)
    assert not torch.equal(after, want)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_draws_in_backward_draws_from_the_threads_own():
    def drawn(seed):
        torch.manual_seed(seed)
        before, seen = torch.get_rng_state(), []
        x = torch.ones(3, requires_grad=True)
        with ThreadRng(5):
            y = x * 2
            y.register_hook(lambda grad: seen.append(torch.rand(3)))
            y.sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
        return seen[0]

    assert torch.equal(drawn(1), drawn(2))


def test_a_seed_inside_a_fork_is_the_threads_own():
    """Story: the fork put the thread's state back, and the seed was the process's, so every step drew the same."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with ThreadRng(5):
        want = torch.rand(3)
    with ThreadRng(5):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
        assert torch.equal(torch.rand(3), want)
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpointing_of_random_state_on_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(ThreadRng, "on_gpu", True)
    with ThreadRng(5), pytest.raises(ValueError, match="pass preserve_rng_state=False"):
        torch.cuda.get_rng_state()


def test_replicas_have_threads_and_cores_of_their_own():
    seen = {}

    class Looking(Plain):
        def forward(self, x):
            seen[threading.current_thread().name] = (torch.get_num_threads(), os.sched_getaffinity(0))
            return super().forward(x)

    before = os.sched_getaffinity(0)
    rank, _ = train(build(Looking), 2)
    assert len(seen) == 2
    assert all(num_threads == rank.engine.num_threads_each for num_threads, _ in seen.values())
    if len(before) >= 2:
        assert not set.intersection(*(cpus for _, cpus in seen.values()))
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("row", [0, 20])
def test_an_error_in_one_replica_ends_the_step_in_all(row):
    class Failing(Plain):
        def forward(self, x):
            if (x[:, 0] == 77.0).any():
                raise KeyError("a row that cannot be computed")
            return super().forward(x)

    rank = Rank(world(1)[0], build(Failing), engine=Engine(3))
    rank.train(BATCHES[:1])
    before, num_threads = rank.state(), threading.active_count()
    x = BATCHES[1][0].clone()
    x[row, 0] = 77.0
    with pytest.raises(KeyError, match="cannot be computed"):
        rank.train([(x, BATCHES[1][1])])
    assert all(torch.equal(value, before[name]) for name, value in rank.state().items())
    rank.train(BATCHES[1:])
    want, _ = reference(build(Failing), BATCHES)
    assert gap(rank.state(), want) < 1e-11
    assert threading.active_count() == num_threads
    rank.engine.close()


def test_autocast_of_the_caller_holds_in_every_replica():
    seen = []

    class Looking(Plain):
        def forward(self, x):
            out = super().forward(x)
            seen.append(out.dtype)
            return out.float()

    rank = Rank(world(1)[0], build(Looking, torch.float32), engine=Engine(2))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        rank.train([rows(8, 0, torch.float32)])
    assert seen == [torch.bfloat16] * 2
    rank.engine.close()


def test_batches_of_any_shape_are_split():
    x, y = torch.arange(10).view(5, 2), torch.arange(5)
    parts = split(({"x": x, "k": 3, "deep": [x, torch.ones(2)]}, y), 3)
    assert [len(part[-1]) for part in parts] == [1, 2, 2]
    assert torch.equal(torch.cat([part[0]["x"] for part in parts]), x)
    assert torch.equal(torch.cat([part[0]["deep"][0] for part in parts]), x)
    assert all(part[0]["k"] == 3 and len(part[0]["deep"][1]) == 2 for part in parts)
    assert len(split((x[:1], y[:1]), 2)) == 1


def test_a_model_that_cannot_be_copied_is_refused():
    class Holding(Plain):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(ValueError, match=r"Holding cannot be copied.*threads:k"):
        twin(build(Holding), 1)
    with pytest.raises(ValueError, match=r"replicas:k.*k >= 1, got 0"):
        Engine(0)
