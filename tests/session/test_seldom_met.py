"""What few models, losses and optimizers do is computed as PyTorch does it, or refused in words."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
import ranks
from device import DEVICE
from nodes import IN, Rank, Whole, build, engine_of, gap, reference, rows
from paceline.engine import reproducible
from paceline.engine.compute import batch as batches
from paceline.engine.compute.gradient_hooks import Backward
from paceline.engine.node.local_exchange import LocalLeader
from paceline.exchange.allreduce import Exchange
from paceline.link.memory import world
from paceline.messages import DENSE, FACTORS, Bucket, Gradient, Vote
from paceline.registry import parse


class Placed(nn.Module):
    """A large parameter that is added to what is computed before: with one row both have one gradient."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))
        self.place = nn.Parameter(torch.randn(1024, 256))

    def forward(self, x):
        return x * self.scale + self.place[None]


def test_what_is_added_up_on_its_way_is_not_what_backward_still_reads():
    """Story: the sum of everyone's gradient lay in memory of which another gradient was still being computed."""
    model, x, seen = Placed(), torch.randn(1, 1024, 256), {}
    model(x).square().sum().backward()
    want = {name: each.grad.clone() for name, each in model.named_parameters()}

    def offer(gradient):
        seen[gradient.bucket.names[0]] = gradient.flat.clone()
        gradient.flat.fill_(float("nan"))  # as whoever adds up in place may

    backward = Backward(model)
    backward.run([DENSE] * len(backward.buckets), offer, lambda: model(x).square().sum())
    for name, grad in want.items():
        assert torch.equal(seen[name], grad.reshape(-1)), name


def test_words_of_samples_are_divided_with_them():
    """Story: with `accumulate` the second part's images came with the first part's captions."""
    words = list("abcdefg")
    batch = {
        "x": torch.arange(7),
        "list": words,
        "nested": [torch.arange(7), tuple(words)],
        "size": (7, 7),
        "few": "ab",
    }
    for parts in (batches.split(batch, 3), reproducible.cut(batch, 3)):
        assert [letter for part in parts for letter in part["list"]] == words
        for part in parts:
            own = [words[i] for i in part["x"].tolist()]
            assert part["list"] == own
            assert part["nested"][1] == tuple(own)
            assert (part["size"], part["few"]) == ((7, 7), "ab")


def test_a_layer_that_was_interrupted_trains_on():
    """Story: Ctrl-C within a layer's forward left its weight without a gradient for ever."""
    model, data = build(), [rows(24, seed) for seed in range(3)]
    rank = Rank(world(1)[0], model)
    rank.train(data[:1])
    assert FACTORS in rank.exchange.forms()

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = rank.model.first.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        rank.train(data[1:2])
    hook.remove()
    rank.train(data[1:])
    assert gap(rank.state(), reference(model, data)[0]) < 1e-12


@pytest.mark.parametrize("layer", [nn.Embedding(9, 4, max_norm=1.0), nn.EmbeddingBag(9, 4, scale_grad_by_freq=True)])
def test_layers_that_go_by_the_rows_before_them_are_computed_whole_or_not_at_all(layer):
    model = nn.Sequential(layer)

    def join(engine, **more):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return paceline.join(model, optimizer, F.mse_loss, batch_size=8, engine=engine, **more)

    for engine, more in (("replicas:2", {}), ("reproducible:2", {}), ("sequential", {"accumulate": 2})):
        with pytest.raises(ValueError, match=r"layer '0' has (max_norm|scale_grad_by_freq).*--plan sequential"):
            join(engine, **more)
    join("sequential").close()


def test_a_checkpoint_with_other_layers_frozen_is_gone_on_from(tmp_path):
    """Story: forms of pieces that were cut otherwise ended the first step in an IndexError."""

    def train(frozen, restore):
        model = build(dtype=torch.float32)
        model.second.requires_grad_(not frozen)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with paceline.join(
            model, optimizer, F.cross_entropy, batch_size=24, engine="sequential", folder=tmp_path
        ) as pace:
            assert pace.restore() == restore
            before = model.second.weight.clone()
            pace.step(rows(24, 1, torch.float32))
            pace.save()
            return torch.equal(before, model.second.weight)

    assert train(frozen=True, restore=False)
    assert not train(frozen=False, restore=True)
    assert train(frozen=True, restore=True)


class Own(torch.optim.Optimizer):
    def __init__(self, parameters, **defaults):
        super().__init__(parameters, defaults)

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("defaults", [{"lr": None}, {"step_size": 0.1}])
def test_an_optimizer_need_not_have_a_learning_rate(defaults, tmp_path):
    model = build(dtype=torch.float32)
    want, _ = reference(model, [rows(24, 1, torch.float32)], lambda weights: torch.optim.SGD(weights, 0.1))
    options = {"batch_size": 24, "engine": "sequential", "folder": tmp_path}
    with paceline.join(model, Own(model.parameters(), **defaults), F.cross_entropy, **options) as pace:
        pace.step(rows(24, 1, torch.float32))
        assert gap(model.state_dict(), want) < 1e-6
        with pytest.raises(FloatingPointError, match="learning rate none"):
            pace.step((torch.full((24, IN), float("nan")), torch.zeros(24, dtype=torch.int64)))


def test_who_leads_a_node_hears_what_a_checkpoint_changes_of_the_forms():
    now = SimpleNamespace(load=lambda state: None, forms=lambda: [DENSE])
    leader = SimpleNamespace(exchange=now, alone=False, _forms=[FACTORS], share_forms=lambda: None)
    LocalLeader.load(leader, {"step": 1, "owing": [0]})
    assert leader._forms == [DENSE]


def test_a_schedule_is_at_one_place_on_nodes_that_average_now_and_then():
    """Story: a node without rows of a short last batch fell a step behind, in every epoch."""

    def work(link):
        rank = Rank(link, build(), exchange="local_sgd:2")
        rank.run.job.scheduler = torch.optim.lr_scheduler.StepLR(rank.optimizer, 1, 0.5)
        for count in (24, 1, 24):
            rank.step(Whole(rows(count, 1)))
        return rank.run.job.scheduler.last_epoch

    assert ranks.run(2, work) == [3, 3]


def test_what_is_owed_stays_where_factors_are_not_finite():
    buckets = [Bucket(0, ("a",), ((4,),)), Bucket(1, ("fc.weight",), ((500, 500),), linear=True)]

    def work(link):
        exchange = Exchange()
        exchange.open(engine_of(buckets), link, parse("codec", "feedback/topk:keep=0.5"), rows=2)
        before, pending = dict(exchange.memory), (torch.ones(4), None)
        for bad in (float("nan"), 1.0):
            left = torch.full((2, 500), bad)
            got = [
                (Gradient(buckets[0], flat=torch.ones(4)), pending),
                (Gradient(buckets[1], output_grad=left, layer_input=left), None),
            ]
            exchange.remember(got, Vote(weight=4.0, used=b"\x01\x01"))
            moved = exchange.memory[0] is not before[0]
            assert moved == (bad == 1.0)
        exchange.close()

    ranks.run(2, work)


@pytest.mark.parametrize(
    "hold",
    [
        lambda weights: nn.CrossEntropyLoss(weight=weights),
        lambda weights: partial(F.cross_entropy, weight=weights),
        lambda weights: partial(nn.CrossEntropyLoss(weight=weights).forward),
    ],
)
def test_a_comparison_takes_weights_of_classes_along(tmp_path, monkeypatch, hold):
    monkeypatch.setenv("PACELINE_VERIFY", json.dumps({"folder": str(tmp_path), "steps": 1, "dtype": "float64"}))
    model, loss = build(dtype=torch.float32), hold(torch.tensor([0.2, 1.0, 3.0], device=DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(*rows(24, 1, torch.float32))
    with paceline.join(model, optimizer, loss, batch_size=24, engine="sequential") as pace:
        (batch,) = pace.batches(data)
        with pytest.raises(SystemExit):
            pace.step(batch)
    (said,) = tmp_path.glob("join*/said.json")
    assert len(json.loads(said.read_text())["losses"]) == 1


def test_parts_of_a_loss_have_one_set_of_names():
    def loss(output, target):
        other = "aux" if float(target[0]) == 0 else "kl"
        return {"ce": output.square().mean(), other: output.abs().mean()}

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with paceline.join(model, optimizer, loss, batch_size=4, accumulate=2, engine="sequential") as pace:
        pace.step((torch.ones(4, 2), torch.zeros(4)))
        with pytest.raises(ValueError, match="the parts ce, kl of one micro-batch and ce, aux of another"):
            pace.step((torch.ones(4, 2), torch.tensor([0.0, 0.0, 1.0, 1.0])))
