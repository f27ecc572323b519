"""Weights change in `Engine.apply`, and nowhere else in a training: each one's bits and version are watched."""

import itertools

import pytest
import torch
from torch import nn

import paceline
import ranks
from device import of_cpus
from nodes import OPTIMIZERS, Normed, Plain, Rank, Whole, build, rows
from paceline.engine import sequential
from paceline.step.average import average
from paceline.step.replica_sync import ReplicaSync

BATCHES = [rows(24, seed) for seed in range(4)]


class Watch:
    """``applied``: how often weights were other ones after `Engine.apply`."""

    def __init__(self, engine):
        self.engine, self.inner, self.applied = engine, engine.apply, 0
        self.last = self.now()
        engine.apply = self.apply

    def now(self):
        parameters = self.engine.backward.parameters
        return {name: (each.detach().clone(), each._version) for name, each in parameters.items()}

    def check(self):
        for name, (bits, version) in self.now().items():
            assert torch.equal(bits, self.last[name][0]), f"{name} was written by others"
            assert version == self.last[name][1], f"{name} was written by others, with what it had"

    def apply(self, update):
        self.check()
        result, before = self.inner(update), self.last
        self.last = self.now()
        self.applied += any(not torch.equal(bits, before[name][0]) for name, (bits, _) in self.last.items())
        return result


@pytest.mark.parametrize(
    "engine", ["sequential", "threads:2", "replicas:2", pytest.param("reproducible:4", marks=of_cpus)]
)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_of_every_engine(tmp_path, engine, optimizer):
    torch.manual_seed(0)
    model = build(Plain)
    made, data = OPTIMIZERS[optimizer](model.parameters()), torch.utils.data.TensorDataset(*rows(96, 1))
    with paceline.join(
        model, made, nn.functional.cross_entropy, batch_size=24, engine=engine, clip=0.5, folder=tmp_path
    ) as pace:
        watch = Watch(pace.engine)
        for batch in pace.batches(data, epochs=2):
            pace.step(batch)
            pace.save()
        pace.evaluate(data, lambda output, target: (output.argmax(1) == target).double().sum())
        watch.check()
    assert watch.applied == 8


@pytest.mark.parametrize("exchange", ["allreduce", "ordered", "local_sgd:2"])
@pytest.mark.parametrize("kind", [Plain, Normed])
def test_of_every_exchange(exchange, kind):
    def work(link):
        rank = Rank(link, build(kind), OPTIMIZERS["momentum"], exchange=exchange, buffers="broadcast")
        watch = Watch(rank.engine)
        rank.train(BATCHES)
        average(rank.run)
        watch.check()
        return watch.applied

    (one, other) = ranks.run(2, work)
    assert one == other == len(BATCHES) + (exchange == "local_sgd:2") * 2


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_of_replicas_that_are_held_together(optimizer):
    class Careless(sequential.Engine):
        def apply(self, update):
            applied = super().apply(update)
            if update.gradients and self.off:
                torch._foreach_mul_(list(self.weights), 1 + 1e-9)
            return applied

    def work(link):
        engine = Careless()
        engine.off = link.rank
        rank = Rank(link, build(), OPTIMIZERS[optimizer], engine=engine)
        rank.run.observers.append(ReplicaSync(rank.run, 4, 100, min_values=1))
        watch, targets = Watch(rank.engine), itertools.count()
        inner = watch.inner

        def counted(update):
            for _ in update.targets:
                next(targets)
            return inner(update)

        watch.inner = counted
        for data in BATCHES * 2:
            rank.step(Whole(data))
        watch.check()
        return next(targets)

    assert min(ranks.run(2, work)) > 0, "nothing went round"


def test_who_writes_besides_is_found():
    def work(link):
        rank = Rank(link, build())
        watch = Watch(rank.engine)
        rank.train(BATCHES[:1])
        with torch.no_grad():
            rank.model.second.bias[3] += 1e-9
        with pytest.raises(AssertionError, match=r"second\.bias was written by others"):
            rank.train(BATCHES[1:2])
        return watch.applied

    assert ranks.run(1, work) == [1]
