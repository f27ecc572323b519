"""An outer step is that of the optimizer in its definition, the same on all nodes, through every codec."""

import copy

import pytest
import torch
from torch.nn import functional as F

import ranks
from nodes import OPTIMIZERS, Plain, Rank, build, gap, reference, rows
from paceline.data.sampler import Assignment
from paceline.registry import parse

BATCH = 24
DATA = [rows(BATCH, seed) for seed in range(10)]
CODECS = ("none", "half", "feedback/topk:keep=0.1", "feedback/lowrank:1", "qsgd", "lossless/none")


def train(link, exchange, codec="none", optimizer="sgd", shares=None, data=DATA):
    rank = Rank(link, build(), OPTIMIZERS[optimizer], exchange=exchange, codec=codec, shares=shares)
    rank.train(data)
    return rank.state()


def by_hand(size, period, lr, beta, optimizer, shares=None):
    """The definition: models that train alone, and torch's own SGD on the mean of what they have moved."""
    models = [build() for _ in range(size)]
    inner = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    whole = build()
    outer = torch.optim.SGD(whole.parameters(), lr=lr, momentum=beta, nesterov=beta > 0)
    samples = [0] * size
    for number, (x, y) in enumerate(DATA, 1):
        for node, (model, each) in enumerate(zip(models, inner, strict=True)):
            span = Assignment(node, size, shares=shares).rows(BATCH)
            each.zero_grad()
            F.cross_entropy(model(x[span.start : span.stop]), y[span.start : span.stop]).backward()
            each.step()
            samples[node] += len(span)
        if number % period == 0:
            for weight, *nodes in zip(whole.parameters(), *(model.parameters() for model in models), strict=True):
                moved = ((weight - own).detach() * count for own, count in zip(nodes, samples, strict=True))
                weight.grad = sum(moved) / sum(samples)
            outer.step()
            for model in models:
                model.load_state_dict(copy.deepcopy(whole.state_dict()))
            samples = [0] * size
    return whole.state_dict()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_step_with_plain_outer_sgd_is_all_reduce(size):
    want, _ = reference(build(Plain), DATA, OPTIMIZERS["sgd"])
    for found in ranks.run(size, lambda link: train(link, "diloco:1,lr=1,beta=0")):
        assert gap(found, want) < 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize(("size", "shares"), [(2, None), (3, (1, 2, 3))])
def test_outer_steps_are_those_of_the_definition(optimizer, size, shares):
    """Inner optimizers keep their own state."""
    want = by_hand(size, 2, 0.7, 0.9, optimizer, shares)
    one, *others = ranks.run(size, lambda link: train(link, "diloco:2", optimizer=optimizer, shares=shares))
    assert gap(one, want) < 1e-12
    assert all(torch.equal(one[name], other[name]) for other in others for name in one)


def test_an_average_of_weights_is_outer_sgd_of_rate_1():
    one = ranks.run(3, lambda link: train(link, "diloco:4,lr=1,beta=0", shares=(1, 2, 3)))[0]
    other = ranks.run(3, lambda link: train(link, "local_sgd:4", shares=(1, 2, 3)))[0]
    assert gap(one, other) < 1e-12


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [2, 3])
def test_through_every_codec_all_nodes_have_the_same_weights(codec, size):
    one, *others = ranks.run(size, lambda link: train(link, "diloco:2", codec))
    assert all(torch.equal(one[name], other[name]) for other in others for name in one)
    exact = ranks.run(size, lambda link: train(link, "diloco:2"))[0]
    assert (gap(one, exact) == 0) == (parse("codec", codec).fidelity == "exact")
    assert gap(one, exact) < 1


@pytest.mark.parametrize("what", ["weights", "momentum"])
@pytest.mark.parametrize("codec", ["none", "feedback/lowrank:1"])
def test_nodes_that_an_outer_step_made_unlike_continue_from_rank_0(what, codec, caplog):
    def work(link):
        rank = Rank(link, build(), OPTIMIZERS["sgd"], exchange="diloco:2", codec=codec)
        rank.train(DATA[:4])
        if link.rank == 1:
            exchange = rank.exchange
            each = next(iter(exchange.anchor.values())) if what == "weights" else exchange.momentum[0]
            each.mul_(1 + 1e-9)
        rank.train(DATA[4:])
        return rank.state()

    one, *others = ranks.run(3, work)
    assert all(torch.equal(one[name], other[name]) for other in others for name in one)
    assert len([each for each in caplog.messages if "differed after outer step 2" in each]) == 1
    plain = ranks.run(3, lambda link: train(link, "diloco:2", codec))[0]
    assert gap(one, plain) < (1e-6 if codec == "none" else 1)  # the factors of the others begin anew


def test_a_state_that_is_restored_continues_as_if_it_had_not_been():
    def work(link, middle):
        rank = Rank(link, build(), OPTIMIZERS["sgd"], exchange="diloco:2", codec="feedback/topk:keep=0.1")
        rank.train(DATA[:4])
        if middle:
            kept, weights = copy.deepcopy(rank.exchange.state()), rank.state()
            rank = Rank(link, build(), OPTIMIZERS["sgd"], exchange="diloco:2", codec="feedback/topk:keep=0.1")
            rank.model.load_state_dict(weights)
            rank.exchange.load(kept)
        rank.train(DATA[4:])
        return rank.state()

    plain, restored = (ranks.run(2, lambda link, m=middle: work(link, m))[0] for middle in (False, True))
    assert all(torch.equal(plain[name], restored[name]) for name in plain)


def test_momentum_of_a_checkpoint_belongs_to_parameters_and_not_to_numbers_of_buckets():
    def work(link):
        rank = Rank(link, build(), OPTIMIZERS["sgd"], exchange="diloco:2")
        rank.train(DATA[:2])
        kept = copy.deepcopy(rank.exchange.state())
        names = [names for names, _ in kept["outer"]["momentum"]]
        kept["outer"]["momentum"][0][0] = ["another.weight"]
        rank.exchange.load(kept)
        return names, sorted(rank.exchange.momentum), [list(bucket.names) for bucket in rank.exchange.buckets]

    names, left, buckets = ranks.run(2, work)[0]
    assert sorted(names) == sorted(buckets)
    assert left == [index for index, own in enumerate(buckets) if own != names[0]]


@pytest.mark.parametrize("bad", ["lr=0", "beta=1", "period=0", "period=1.5"])
def test_wrong_options_are_refused(bad):
    with pytest.raises(ValueError, match="exchange 'diloco'"):
        parse("exchange", f"diloco:{bad}")
