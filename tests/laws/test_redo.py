"""A refused step has never been; then the same batch is computed again, by fewer ranks if need be."""

import copy
import random

import numpy
import pytest
import torch

import ranks
from device import deterministic
from nodes import OPTIMIZERS, Conv, Plain, Rank, build, gap, reference, rows
from paceline.data import batches, sampler
from paceline.data.sampler import Assignment
from paceline.engine.compute import rng
from paceline.environment import LaunchEnvironment
from paceline.exchange import allreduce
from paceline.exchange.flow.autotuner import Autotuner
from paceline.link import memory
from paceline.messages import DENSE, FACTORS, Bucket, Decision, Vote
from paceline.registry import parse

BATCHES = [rows(24, seed) for seed in range(12)]


class Refusing(allreduce.Exchange):
    """Votes against chosen steps, once each, on one rank."""

    def __init__(self, steps, rank):
        self.refuse, self.by, self.refused, self.tried = set(steps), rank, [], 0

    def collect(self, vote):
        if self.link.rank == self.by and self.tried in self.refuse:
            self.refuse.remove(self.tried)
            vote.ok = False
        return super().collect(vote)

    def finish(self, tally):
        outcome = super().finish(tally)
        if outcome.decision is Decision.RETRY:
            self.refused.append(self.tried)
        else:
            self.tried += 1
        return outcome


def everything(rank):
    """All that a step may change, as values."""
    state = copy.deepcopy(
        (rank.state(), rank.optimizer.state_dict()["state"], rank.exchange.state(), rank.engine._step_number)
    )
    return state, rng.state()


def same(one, other):
    """Bit for bit, through dicts, lists and tuples."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if hasattr(one, "shape"):
        return (one == other).all()
    return one == other


@pytest.mark.parametrize("codec", ["none", "feedback/topk:keep=0.1", "feedback/lowrank:1", "qsgd"])
def test_a_refused_step_leaves_no_trace(codec):
    steps = sorted(random.Random(1).sample(range(1, 12), 5))
    model = build(Conv)
    compared = []

    def work(link):
        exchange = Refusing(steps, rank=link.size - 1)

        def check(run):
            now = everything(rank)
            compared.append(same(now[0], before[0]) and (link.size > 1 or same(now[1], before[1])))

        rank = Rank(link, model, exchange=exchange, codec=codec, rejoin=check)

        for data in BATCHES:
            before = everything(rank)
            rank.train([data])
        rank.exchange.close()
        return exchange.refused, rank.state()

    # random state is the process's: with ranks as threads only a single rank can be compared
    for size in (2, 1):
        compared.clear()
        results = ranks.run(size, work)
        assert all(refused == steps for refused, _ in results)
        assert compared == [True] * len(steps) * size


def test_dropout_masks_after_refusals_are_those_of_an_undisturbed_run():
    def final(steps):
        def work(link):
            torch.manual_seed(5)
            rank = Rank(link, build(Conv), exchange=Refusing(steps, 0))
            losses = rank.train(BATCHES)
            return losses, rank.state(), rank.exchange.refused

        with deterministic():
            (result,) = ranks.run(1, work)
        return result

    losses, state, _ = final([])
    again, redone, refused = final([0, 3, 4, 9])
    assert refused == [0, 3, 4, 9]
    assert losses == again
    assert same(state, redone)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_same_batch_is_dealt_again_to_fewer_ranks(optimizer):
    """Three ranks; rank 1 leaves in step 4, rank 0 of the rest in step 8: every sample still counts once, in its turn.

    Batches come from the feed, dealt for three ranks and partly fetched ahead for them.
    """
    x, y = (torch.cat(parts) for parts in zip(*BATCHES, strict=True))
    generations = [memory.Hub(3), memory.Hub(2), memory.Hub(1)]
    model, left = build(Plain), []

    class Fetched:
        """A source that may be fetched ahead."""

        def __len__(self):
            return len(x)

        def fetch(self, indices, epoch):
            return x[indices], y[indices]

    class Gone(Exception):
        pass

    def work(link):
        exchange = Refusing([4, 8] if link.rank == 0 else [], rank=0)

        def rejoin(run):
            generation = exchange.link.generation + 1
            leaver = {1: 1, 2: 0}[generation]
            if exchange.link.rank == leaver:
                left.append((generation, exchange.tried))
                raise Gone
            rank_now = exchange.link.rank - (exchange.link.rank > leaver)
            rank.members.link = memory.Link(generations[generation], rank_now, generation)
            exchange.rebuild(rank.members.link)
            run.assignment = Assignment(rank_now, exchange.link.size)
            run.world = LaunchEnvironment(node=rank_now, num_nodes=exchange.link.size)

        rank = Rank(link, model, OPTIMIZERS[optimizer], exchange=exchange, rejoin=rejoin)
        losses = []
        try:
            for batch in batches.batches(Fetched(), 24, 1, seed=3, assignment=rank.run.assignment):
                vote = rank.step(batch).vote
                losses.append(vote.loss_sum / vote.weight)
            return losses, rank.state()
        except Gone:
            return None
        finally:
            exchange.close()

    links = [memory.Link(generations[0], r) for r in range(3)]
    results = ranks.run(3, work, links)
    assert sorted(left) == [(1, 4), (2, 8)]
    (survivor,) = [result for result in results if result]
    turns = sampler.permutation(3, 0, len(x)).reshape(12, 24)
    want, want_losses = reference(model, [(x[turn], y[turn]) for turn in turns], OPTIMIZERS[optimizer])
    assert survivor[0] == pytest.approx(want_losses, rel=1e-12)
    assert gap(survivor[1], want) < 1e-11


@pytest.mark.parametrize("drawn_before", range(4))
@pytest.mark.parametrize("drawn_after", range(1, 4))
def test_random_numbers_come_again(drawn_before, drawn_after):
    """NumPy's normals come in pairs: the second lies ready, and using it up changes no other state."""

    def draw(count):
        return [(random.gauss(), float(torch.randn(())), float(numpy.random.randn())) for _ in range(count)]

    for _ in range(3):
        draw(drawn_before)
        kept = rng.state()
        first = draw(drawn_after)
        rng.set_state(kept)
        assert draw(drawn_after) == first
        rng.set_state(kept)
        assert rng.to_json(rng.state()) == rng.to_json(kept)


def test_rows_that_do_not_fit_any_more_are_refused_also_by_one_node_alone():
    """Story: of two nodes one was left, whose processes' factors fitted each, and together did not."""
    bucket = Bucket(0, ("weight",), ((64, 64),), True)
    choice = Autotuner(
        (bucket,), 1, dict.fromkeys((DENSE, FACTORS), parse("codec", "none")), "bytes", 8, True, by_need=False
    )
    choice.num_multipliers = 2
    few, many = (Vote(rows=(count,), dense=bytes(1)) for count in (8, 40))
    assert not choice.needs_retry(few, [few])
    assert choice.forms == [FACTORS]
    assert choice.needs_retry(many, [many])
    assert choice.forms == [DENSE]
