"""Where a pipeline is cut: as named, as the model's own, or as one step has shown; what cannot be cut is told."""

import re
import time

import pytest
import torch
from test_pipeline import same, train
from torch import nn
from torch.nn import functional as F

from device import of_cpus
from nodes import HIDDEN, IN, OUT, build
from paceline.engine import pipeline, sequential
from paceline.engine.checks.pass_times import PassTimes, even_cuts, typical
from paceline.engine.stages import micro_batches
from paceline.registry import find

pytestmark = of_cpus


@pytest.mark.parametrize(("name", "convolutions"), [("alexnet", 4), ("vgg16", 8)])
def test_a_models_own_cut(name, convolutions):
    with torch.device("meta"):
        model = find("models", name, 3)
    (cut,) = model.pipeline_cuts[2]
    before = [m for n, m in model.features.named_children() if int(n) < int(cut.partition(".")[2])]
    assert sum(isinstance(module, nn.Conv2d) for module in before) == convolutions
    assert isinstance(before[-1], nn.Conv2d)


def test_the_cut_is_the_models_own_or_is_found_and_said():
    model, plain = build(), build()
    model.pipeline_cuts = {2: ["second"]}
    want = train(lambda: pipeline.Engine(2, 4, cut="second"), plain)[0][0]
    assert same(want, train(lambda: pipeline.Engine(2, 4, cut="preset"), model)[0][0])
    with pytest.raises(ValueError, match="Plain has none for 2 stages; name the modules, or leave cut out"):
        train(lambda: pipeline.Engine(2, 4, cut="preset"), plain)
    made = pipeline.Engine(2, 4)
    train(lambda: made, plain)
    told = r"is cut before '(\w+)', where its passes are divided into \d+ %, \d+ %, and its weights into (\d+) %"
    found = re.search(told, made.hint)
    layers = list(model.children())
    first = layers[: [name for name, _ in model.named_children()].index(found[1])]
    numel = sum(each.numel() for layer in first for each in layer.parameters())
    assert int(found[2]) == round(100 * numel / sum(each.numel() for each in model.parameters()))


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ("unusual", "is to cut before 'unusual', which is no module of this model; its named_modules.. has 'unused'"),
        ("unused", "forward did not call 'unused', before which the pipeline is cut"),
        ("twice", "forward calls 'twice' twice, and no cut can be there; cut the pipeline elsewhere"),
        (
            "begin",
            "is cut before 'begin', and forward computes nothing in the stage before: its first layer is 'begin'",
        ),
        ("begin.0", "is cut before 'begin.0', and forward computes nothing in the stage before"),
        ("head;inner", "forward calls 'inner' before 'head'; cut= names modules in the order in which"),
        ("inner;inner.0", "is cut before 'inner.0', and forward computes nothing in the stage before"),
        ("inner;head;head", "forward calls 'head' before 'head'"),
    ],
)
def test_a_cut_that_is_none_is_told(cut, said):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice, self.unused, self.head = nn.Linear(IN, IN), nn.Linear(3, 3), nn.Linear(IN, OUT)
            self.begin, self.inner = nn.Sequential(nn.Linear(IN, IN)), nn.Sequential(nn.Linear(IN, IN))

        def forward(self, x):
            return self.head(self.inner(self.twice(self.twice(self.begin(x)))))

    with pytest.raises(ValueError, match=said):
        train(lambda: pipeline.Engine(cut.count(";") + 2, 4, cut=cut), Odd().double())


class Own(nn.Module):
    """Its first stage has weights of the model itself, and calls no module."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(HIDDEN, IN) / IN), nn.Linear(HIDDEN, OUT)

    def forward(self, x):
        return self.head(torch.tanh(F.linear(x, self.weight)))


def test_a_stage_may_have_weights_and_no_modules():
    model = build(Own)
    want = train(sequential.Engine, model, accumulate=4)[0][0]
    for cut in ("head", ""):
        assert same(want, train(lambda cut=cut: pipeline.Engine(2, 4, cut=cut), model)[0][0])


@pytest.mark.parametrize(("stages", "said"), [(3, "Own has 1; use at most 2 stages, or another engine"), (2, "")])
def test_too_few_places_to_cut_are_counted(stages, said):
    model = build(Own) if said else nn.Linear(IN, OUT).double()
    text = said or "a pipeline of 2 stages cuts a model before 1 modules .*, and Linear has 0; use another engine"
    with pytest.raises(ValueError, match=text):
        train(lambda: pipeline.Engine(stages, 4), model)


def test_cuts_divide_a_pass_evenly_and_leave_each_stage_a_place():
    begins = {"a": 0.1, "b": 0.45, "c": 0.9}
    assert even_cuts(begins, begins, 2, "Model") == ["b"]
    assert even_cuts(begins, begins, 3, "Model") == ["b", "c"]
    late = {"a": 0.8, "b": 0.9, "c": 0.95}
    assert even_cuts(late, late, 4, "Model") == ["a", "b", "c"]


def test_of_places_that_tie_in_time_the_one_that_divides_the_weights_is_cut():
    assert even_cuts({"a": 0.44, "b": 0.55}, {"a": 0.55, "b": 0.7}, 2, "Model") == ["a"]
    assert even_cuts({"a": 0.4, "b": 0.55}, {"a": 0.55, "b": 0.7}, 2, "Model") == ["b"], "a is slower"


@pytest.mark.parametrize(("widths", "cut", "nearer"), [((100, 100), "1", "2"), ((1, 200), "2", "1")])
def test_the_weights_before_a_place_are_those_of_the_model(monkeypatch, widths, cut, nearer):
    """Of 9,700, 10,100 and 303 weights the first layer is half, of 97, 400 and 603 the last."""
    monkeypatch.setattr(micro_batches, "typical", lambda _: dict(sorted({cut: 0.49, nearer: 0.5}.items())))
    first, second = widths
    made = pipeline.Engine(2, 4)
    layers = nn.Linear(IN, first), nn.Linear(first, second), nn.Linear(second, OUT)
    train(lambda: made, nn.Sequential(*layers).double())
    assert f"is cut before {cut!r}" in made.hint


def test_one_slow_pass_does_not_move_the_cut():
    passes = [{"b": 0.9, "c": 0.95}, {"b": 0.5, "c": 0.8}, {"b": 0.05, "c": 0.5}, {"b": 0.49, "c": 0.81}]
    assert typical(passes) == {"b": 0.49, "c": 0.8}
    del passes[2]["c"]  # called twice
    assert typical(passes) == {"b": 0.49}


def test_the_part_before_a_place_is_that_of_both_passes():
    times = PassTimes()
    times.begins = {"a": [10.0], "b": [11.0], "c": [12.0]}
    times.layers, times.span = {"a": 0, "b": 1, "c": 2}, (10.0, 13.0)
    assert times.places() == {"b": 1 / 3, "c": 2 / 3}
    times.known = {"c": 14.0, "b": 19.0}  # the last part's backward takes 1 s, the second's 5, the first's 1
    assert times.places(20.0) == {"b": 0.2, "c": 0.8}
    del times.known["b"]  # the first part is frozen
    assert times.places(19.0) == {"b": 1 / 9, "c": 7 / 9}


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.05)
        return gradient


class Slow(nn.Linear):
    def forward(self, x):
        return SlowBackward.apply(super().forward(x))


def test_slow_backward_passes_are_divided():
    """By forward alone both models would be cut in their middle."""
    torch.manual_seed(1)
    for slow, cut in (((2, 3), "3"), ((0, 1), "1")):
        layers = [(Slow if i in slow else nn.Linear)(IN, OUT if i == 3 else IN) for i in range(4)]
        made = pipeline.Engine(2, 4)
        train(lambda made=made: made, nn.Sequential(*layers).double())
        assert f"is cut before {cut!r}" in made.hint
