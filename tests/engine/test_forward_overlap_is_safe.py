"""While updates are still coming, nothing else that a script, a model or a codec does meets half of a step."""

import copy
import threading
import warnings

import pytest
import torch
from torch import nn

import paceline
import ranks
from device import waits_in_backward
from nodes import Rank, Whole, build, gap, reference, rows
from paceline import contract
from paceline.errors import NotFinite
from paceline.exchange.allreduce import Exchange
from paceline.link import memory
from paceline.messages import DENSE, SUM, Coded, Collective, Round

BATCHES = [rows(24, seed) for seed in range(5)]
OPEN_S = 0.3  # in which a gate opens by itself: that alone decides what a mistake would read


class Gate:
    """What a message waits for; opens some time after `close`."""

    def __init__(self):
        self.event = threading.Event()
        self.event.set()

    def close(self):
        self.event.clear()
        threading.Timer(OPEN_S, self.event.set).start()


class Arrival:
    def __init__(self, handle, event):
        self.handle, self.event = handle, event

    def done(self):
        return self.event.is_set() and self.handle.done()

    def wait(self, deadline_s=None):
        assert self.event.wait(60.0)
        return self.handle.wait(deadline_s)


class Gated(memory.Link):
    """Sums of gradients leave when ``leave`` is open, and the one numbered ``number`` arrives when ``arrive`` is."""

    number, sums, gated = 0, 0, False

    def __init__(self, hub, rank, generation=0, name=""):
        super().__init__(hub, rank, generation, name)
        self.leave, self.arrive = Gate(), Gate()

    def lane(self, name):
        lane = Gated(self.hub, self.rank, self.generation, f"{self.name}/{name}")
        lane.leave, lane.arrive, lane.number, lane.gated = self.leave, self.arrive, self.number, name == "gradients"
        return lane

    def sum(self, tensor, what="sum"):
        if not self.gated:
            return super().sum(tensor, what)
        assert self.leave.event.wait(60.0)
        self.sums += 1
        handle = super().sum(tensor, what)
        return Arrival(handle, self.arrive.event) if self.sums == self.number else handle


def world(size, number=0):
    hub = memory.Hub(size)
    links = [Gated(hub, rank) for rank in range(size)]
    for link in links:
        link.number = number
    return links


def rank_of(link, model, **options):
    exchange = Exchange(DENSE)
    exchange.overlap = "forward"
    return Rank(link, model, exchange=exchange, **options)


class Listening(contract.Codec):
    """A codec that notes for which step it was asked."""

    def __init__(self):
        self.steps = []

    def rounds(self, bucket, size, dtype):
        return [Round(SUM, bucket.numel * dtype.itemsize)]

    def run(self, bucket, values, state, context):
        self.steps.append(context.step)
        return Coded((yield Collective(SUM, values)))


def test_a_thread_that_sends_late_sends_the_same_and_what_is_decided_by_it_is_decided_alike():
    """Story: a rank whose pieces left after its vote took them for fp32, and had them encoded as the next step's."""

    def work(link):
        rank = rank_of(link, build())
        codec = rank.exchange.codecs[DENSE] = Listening()
        late = link.rank == 1
        if late:
            link.leave.event.clear()
        rank.step(Whole(BATCHES[0]))
        costs = rank.exchange._before[1]
        link.leave.event.set()
        rank.train(BATCHES[1:3])
        rank.engine.wait_pending()
        rank.exchange.close()
        return costs, codec.steps, len(rank.engine.buckets)

    (costs, steps, num), other = ranks.run(2, work, world(2))
    assert steps == [step for step in range(3) for _ in range(num)]
    assert (costs, steps, num) == other


def _shifted(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + by)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    shifted = torch.jit.script(_shifted)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(96))

    def forward(self, x):
        return shifted(x, self.by)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shift, self.second = nn.Linear(96, 96, bias=False), Shift(), nn.Linear(96, 96, bias=False)

    def forward(self, x):
        return self.second(self.shift(self.first(x)))


def test_a_module_finds_its_own_weights_whatever_function_reads_them():
    """Story: scripted functions are no torch functions to be seen, and read the weights of the step before."""
    model = build(Shifted)

    def work(link):
        rank = rank_of(link, model)
        for data in BATCHES[:3]:
            link.arrive.close()
            rank.train([data])
        rank.engine.wait_pending()
        rank.exchange.close()
        return rank.state()

    buckets = [bucket.names for bucket in Rank(memory.world(1)[0], model).engine.buckets]
    want, _ = reference(model, BATCHES[:3])
    place = 1 + buckets.index(("shift.by",))
    for number in (place, len(buckets) + place):  # the first step's, and the second's
        assert all(gap(state, want) < 1e-12 for state in ranks.run(2, work, world(2, number)))


class Normal(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(96, 96), nn.BatchNorm1d(96), nn.Linear(96, 96)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


@waits_in_backward
def test_a_bad_gradient_is_told_by_all_at_one_place_of_the_step():
    """Story: one rank raised NotFinite before a layer of batch norm, the others waited in it for its rows."""
    model = build(Normal)
    order = [bucket.names for bucket in Rank(memory.world(1)[0], model).engine.buckets]

    def work(link):
        rank = rank_of(link, model, batch_norm="sync")
        hook = rank.model.second.weight.register_hook(lambda grad: grad * float("nan"))
        if link.rank:
            link.arrive.close()
        rank.train(BATCHES[:1])
        hook.remove()
        with pytest.raises(NotFinite, match=r"second\.weight"):
            rank.train(BATCHES[1:2])
        losses = rank.train(BATCHES[2:])
        rank.exchange.close()
        return losses

    one, other = ranks.run(2, work, world(2, 1 + order.index(("first.weight",))))
    assert one == other


def test_what_was_not_applied_is_not_remembered():
    """A gradient that is not finite under a finite loss: its residual would be so in all steps to come."""

    def work(link):
        for overlap in ("backward", "forward"):
            rank = rank_of(memory.Link(link.hub, link.rank, 0, overlap), build(), codec="feedback/topk:keep=0.1")
            rank.exchange.overlap = overlap
            rank.train(BATCHES[:2])
            if link.rank:
                hook = rank.model.head.weight.register_hook(lambda grad: grad * float("nan"))
            if overlap == "forward":
                rank.train(BATCHES[:1])
                if link.rank:
                    hook.remove()
            with pytest.raises(NotFinite):
                rank.train(BATCHES[1:2])
            if link.rank:
                hook.remove()
            losses = rank.train(BATCHES)
            rank.engine.wait_pending()
            assert all(loss == loss for loss in losses), overlap
            assert all(value.isfinite().all() for value in rank.state().values()), overlap
            rank.exchange.close()

    ranks.run(2, work)


def test_copies_loads_and_norms_between_steps():
    """Stories: a copy of the model dragged threads along; a loaded state had the last step added; a piece's norm."""
    model = build()

    def work(link):
        rank = rank_of(link, model)
        rank.train(BATCHES[:1])
        rank.engine.wait_pending()
        assert rank.engine.norm is None, "the norm of one piece is nobody's"
        kept = copy.deepcopy(rank.optimizer.state_dict())
        rank.train(BATCHES[1:2])
        rank.optimizer.load_state_dict(kept)
        state = rank.optimizer.state_dict()["state"]
        assert all(torch.equal(state[i]["momentum_buffer"], one["momentum_buffer"]) for i, one in kept["state"].items())
        rank.train(BATCHES[2:3])
        best = copy.deepcopy(rank.model)
        assert best(BATCHES[0][0]).shape == (24, 3)
        rank.train(BATCHES[3:])
        rank.engine.wait_pending()
        rank.exchange.close()
        return rank.state()

    one, other = ranks.run(2, work)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_compiled_part_is_refused():
    model = build()
    model.second._compiled_call_impl = lambda *_: None  # as `model.second.compile()` leaves it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="scripted or compiled module hides where it reads a weight"):
        paceline.join(model, optimizer, nn.functional.mse_loss, batch_size=8, engine="sequential", overlap="forward")
