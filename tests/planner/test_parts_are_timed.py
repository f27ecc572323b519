"""The parts of a job are timed by themselves: each layer, a micro-batch, several copies at once, the update."""

from __future__ import annotations

import itertools
import os
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.planner.measure import update_timing
from paceline.planner.measure.forked_copies import ForkedCopies
from paceline.planner.measure.layers import LayerTimer, first_samples
from paceline.planner.measure.micro_batch import MicroBatchTimer
from paceline.planner.measure.update_timing import MAX_PASSES

NAP_S = 0.005

# Layers.


class Nap(nn.Module):
    """Sleeps forward and, twice as long, backward."""

    def forward(self, x):
        time.sleep(NAP_S)
        return Asleep.apply(x)


class Asleep(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x * 1.0

    @staticmethod
    def backward(_, slope):
        time.sleep(2 * NAP_S)
        return slope


def layers_of(model, *inputs, words=(), absorbed=()):
    return LayerTimer(model, lambda: model(*inputs), words, {id(p) for p in absorbed})


def test_the_sum_of_layers_that_sleep_is_what_they_sleep():
    """The same nap three times is timed once and counted three times."""
    nap = Nap()
    layers = layers_of(nn.Sequential(nn.Linear(4, 4), nap, nap, nn.Sequential(nap)), torch.ones(2, 4))
    assert [call.count for call in layers.calls] == [1, 3]
    assert layers.num_calls == 4
    passes = [layers.time() for _ in range(3)]
    assert 9 * NAP_S <= layers.total_s(passes) < 30 * NAP_S


class Everything(nn.Module):
    """What models do besides being sequential."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.bend = nn.ReLU(inplace=True)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens, scale=1.0):
        x = self.words(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x, _ = self.memory(x)
        return self.out(self.bend(x * scale)[:, -1])


def test_every_kind_of_layer_is_timed_and_the_model_is_as_before():
    model = Everything()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layers = layers_of(model, torch.randint(0, 10, (4, 5)))
    kinds = {type(call.module).__name__ for call in layers.calls}
    assert kinds == {"Embedding", "MultiheadAttention", "LSTM", "LayerNorm", "ReLU", "Linear"}
    for _ in range(2):
        assert all(seconds > 0 for seconds in layers.time())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.mm.default
        return function(*args, **(kwargs or {}))


def test_a_weight_whose_factors_are_absorbed_costs_no_gradient():
    """Counted in multiplications: forward, and the gradients of weight and input, which the first layer's needs not."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))

    def products(absorbed):
        layers = layers_of(model, torch.ones(16, 32), absorbed=absorbed)
        with Products() as counter:
            layers.time()
        return counter.count

    assert products([]) == 2 + 3
    assert products(list(model.parameters())) == 1 + 2
    assert all(p.requires_grad for p in model.parameters())


def test_words_lay_images_out_and_rows_are_the_first_ones():
    images, labels, table = torch.randn(6, 3, 4, 4), torch.arange(6), torch.ones(2, 2)
    words = {"list": [*"abcdef"], "tuple": tuple("abcdef"), "size": (4, 4)}
    few = first_samples({"x": images, "y": (labels, table, "name"), **words}, 2, ("channels_last",))
    assert few["x"].shape == (2, 3, 4, 4)
    assert few["x"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(few["x"], images[:2])
    assert few["y"][0].tolist() == [0, 1]
    assert few["y"][1].shape == (2, 2)
    assert few["y"][2] == "name"
    assert (few["list"], few["tuple"], few["size"]) == (["a", "b"], ("a", "b"), (4, 4))


def test_layers_under_autocast_are_fed_what_they_were_fed():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        layers = layers_of(model, torch.ones(2, 4), words=("bf16",))
    assert [call.inputs[0].dtype for call in layers.calls] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert len(layers.time()) == 3


def test_the_largest_of_stages_that_are_cut_between_layers():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.ReLU(), nn.Linear(4, 2))
    timer = LayerTimer(model, lambda: model(torch.ones(3, 4)), (), set())
    assert timer.order == [0, 1, 1, 1, 2, 3]
    each_s = [3.0, 1.0, 1.0, 2.0]  # 3 1 1 1 | 1 2, or 3 1 | 1 1 1 2
    assert timer.largest([each_s], 2) == pytest.approx(5 / 9)
    assert timer.largest([each_s], 3) == pytest.approx(3 / 9)


def test_a_micro_batch_adds_its_gradients_to_those_of_another():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    weights = list(model.parameters())
    timer = MicroBatchTimer(lambda: model(torch.ones(3, 4)).sum(), weights, {id(model[0].weight)})
    (_,), (once, *_) = timer.time(), [each.grad for each in weights[1:]]
    once = once.clone()
    taken = [timer.time() for _ in range(2)]
    torch.testing.assert_close(weights[1].grad, 3 * once)
    assert weights[0].grad is None, "the optimizer takes factors"
    assert all(weight.requires_grad for weight in weights)
    assert 0 < timer.total_s(taken) == min(taken)[0]


# Copies.


def work(what, options):
    if what == "where":
        return [os.getpid(), len(os.sched_getaffinity(0))]
    if what == "add":
        return options["a"] + options["b"]
    if what == "hang":
        time.sleep(60)
    if what == "die":
        os._exit(1)
    raise KeyError(what)


@pytest.fixture
def copies():
    cores = sorted(os.sched_getaffinity(0))
    made = ForkedCopies(2, work, cores, time.monotonic() + 20)
    yield made
    pids = list(made.pids)
    made.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_copies_do_the_same_at_once_each_on_its_cores(copies):
    (first, num_cores), (second, _) = copies.request(2, "where")
    assert len({first, second, os.getpid()}) == 3
    assert num_cores == max(1, len(os.sched_getaffinity(0)) // 2)
    assert copies.request(2, "add", a=1, b=2) == [3, 3]
    assert copies.request(1, "add", a=1, b=2) == [3]


def test_a_copy_that_fails_dies_or_hangs_is_told(copies):
    with pytest.raises(RuntimeError, match="KeyError: 'nothing'"):
        copies.request(2, "nothing")
    copies.deadline = time.monotonic() + 0.3
    with pytest.raises(TimeoutError, match="did not finish 'hang' in time"):
        copies.request(1, "hang")


def test_a_dead_copy_is_told(copies):
    with pytest.raises(RuntimeError, match="a copy of the process died"):
        copies.request(1, "die")


# How often.


@pytest.mark.parametrize(
    ("once_s", "count", "spent_s"), [(0.001, MAX_PASSES, 0.008), (0.25, 2, 0.75), (1.0, 1, 2.0), (5.0, 1, 5.0)]
)
def test_a_part_is_timed_as_often_as_its_second_allows(monkeypatch, once_s, count, spent_s):
    """Besides the first time, which warms up and counts where another would take far too long."""
    now = 0.0

    def once():
        nonlocal now
        now += once_s

    monkeypatch.setattr(update_timing, "time", SimpleNamespace(perf_counter=lambda: now))
    assert len(update_timing.passes(once, 1.0)) == count
    assert now == pytest.approx(spent_s)


def test_the_first_update_which_makes_the_state_does_not_count():
    """Story: AlexNet's update was timed at 0.34 s where it takes 0.1: there was no time for a second one."""
    numbers = itertools.count()
    assert update_timing.passes(lambda: next(numbers), 0.0) == [0]
    assert update_timing.passes(lambda: next(numbers), 0.0, least=1) == [2]
