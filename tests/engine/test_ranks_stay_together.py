"""What is so on one rank alone is known to all, or changes nothing for anyone."""

import copy
from types import MethodType

import pytest
import torch
from torch.nn import functional as F

import ranks
from nodes import OPTIMIZERS, Rank, Whole, build, gap, reference, rows
from paceline import contract, messages
from paceline.elastic.consistency import compare
from paceline.elastic.membership import connect
from paceline.engine.compute.batch import judged
from paceline.engine.sequential import Engine
from paceline.errors import LinkError, NotFinite
from paceline.exchange.allreduce import Exchange
from paceline.job import Job
from paceline.launch.local import free_port
from paceline.link import gloo
from paceline.messages import DENSE, FACTORS, SUM, Coded, Collective, Round, Vote
from paceline.registry import parse

BATCHES = [rows(24, seed) for seed in range(5)]
BAD = torch.full_like(BATCHES[0][0], float("nan")), BATCHES[0][1]


class Broken(Whole):
    def share(self, assignment):
        if assignment.node:
            raise KeyError("a file that is not there")
        return super().share(assignment)


def test_a_step_that_one_rank_did_not_make_is_not_made_up_with_another_batch():
    """Story: the script went on with its next batch, which the others took for a part of this one."""

    def work(link):
        rank = Rank(link, build())
        rank.train(BATCHES[:1])
        with pytest.raises(KeyError if link.rank else LinkError):
            rank.step(Broken(BATCHES[1]))
        with pytest.raises(LinkError, match="interrupted in this process, and the others still wait in it; join again"):
            rank.step(Whole(BATCHES[2]))
        link.hub.kill(link.rank)
        return rank.run.num_steps

    assert ranks.run(2, work) == [1, 1]


def test_batches_of_different_length_are_told():
    """Story: two datasets of one sample more or less, and the ranks divided by different numbers."""

    def work(link):
        rank = Rank(link, build())
        rank.train(BATCHES[:1])
        with pytest.raises(ValueError, match=r"batches of 24, 23 rows in the same step; give each process"):
            rank.step(Whole(rows(24 - link.rank, 1)))

    ranks.run(2, work)


class Doubled(contract.Codec):
    """Twice as long as the gradient."""

    def rounds(self, bucket, size, dtype):
        return [Round(SUM, 2 * bucket.numel * dtype.itemsize)]

    def run(self, bucket, values, state, context):
        whole = yield Collective(SUM, torch.cat([values, values]))
        assert len(whole) == 2 * bucket.numel
        return Coded(whole[: bucket.numel])


def test_payloads_of_any_length_go_together():
    def work(link, codec):
        rank = Rank(link, build(), exchange=Exchange(DENSE))
        rank.exchange.codecs[DENSE] = codec
        rank.exchange.choice.groups = ((0, 1), (2,))
        rank.train(BATCHES)
        rank.exchange.close()
        return rank.state()

    one, other = (ranks.run(2, lambda link, c=codec: work(link, c))[0] for codec in (Doubled(), parse("codec", "none")))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_weight_frozen_in_mid_training_stays_as_it_is():
    """Story: a layer whose gradient travels as factors was thawed by its own forward pass."""

    def train(rank, step):
        step(BATCHES[:2])
        rank.model.second.weight.requires_grad_(False)
        frozen = rank.model.second.weight.clone()
        step(BATCHES[2:])
        assert torch.equal(rank.model.second.weight, frozen)
        assert not rank.model.second.weight.requires_grad

    def work(link):
        rank = Rank(link, build(), exchange=Exchange("bytes"))
        train(rank, rank.train)
        assert rank.exchange.forms().count(FACTORS) == 2
        rank.exchange.close()
        return rank.state()

    class Alone:
        model = build()

        def __init__(self):
            self.optimizer = OPTIMIZERS["momentum"](self.model.parameters())

        def step(self, batches):
            for x, y in batches:
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()

    plain = Alone()
    train(plain, plain.step)
    assert all(gap(state, plain.model.state_dict()) < 1e-12 for state in ranks.run(2, work))


def test_between_averages_a_bad_loss_ends_its_own_rank_and_the_others_hear_of_it():
    """Story: it asked the others for their findings, while they asked it for its weights."""

    def work(link):
        rank = Rank(link, build(), exchange="local_sgd:3")
        rank.train(BATCHES[:1])
        with pytest.raises(NotFinite if link.rank else LinkError, match=r"rank 1"):
            rank.train([BAD if link.rank else BATCHES[1], *BATCHES[2:]])
        link.hub.kill(link.rank)

    ranks.run(2, work)


def test_between_averages_all_stop_after_the_same_step():
    """Story: whoever had heard the signal began to save, and the others to average."""

    def work(link):
        rank, stops = Rank(link, build(), exchange="local_sgd:3"), []
        for number in range(8):
            rank.run.stop_signal = 15 if link.rank and number >= 1 else 0
            stops.append(rank.step(Whole(BATCHES[number % 5])).vote.stop_signal)
        return stops

    one, other = ranks.run(2, work)
    assert one == other
    assert one[:4] == [0, 0, 0, 15]


def test_a_peer_that_has_left_is_not_waited_for(monkeypatch):
    """Story: it had closed the link, and its process lived on: the other waited for half an hour."""
    monkeypatch.setattr(gloo, "LEFT_S", 1.0)
    port = free_port()

    class Seat:
        def __init__(self, rank):
            self.rank, self.hub = rank, self

        def kill(self, rank):
            pass

    def work(assignment):
        link = connect("gloo", assignment.rank, 2, "127.0.0.1", port).link
        link.sum(torch.ones(1)).wait(10)
        if assignment.rank:
            link.close()
            return "left"
        with pytest.raises(LinkError, match=r"rank 1 on .* has left"):
            link.sum(torch.ones(1)).wait(20)
        link.close()
        return "told"

    assert ranks.run(2, work, [Seat(0), Seat(1)]) == ["told", "left"]


def job(rank, what):
    """The job that both ranks were given, but for one thing on rank 1."""
    model = build()
    rate = 0.2 if rank and what == "optimizer" else 0.1
    kind = torch.optim.Adam if rank and what == "kind of optimizer" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=rate)
    words = {"batch_norm": "sync"} if rank and what == "batch_norm" else {}
    if rank and what == "scheduler":
        words["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return Job(model, optimizer, F.cross_entropy, 8, **words)


@pytest.mark.parametrize(
    "what",
    ["", "optimizer", "kind of optimizer", "scheduler", "batch_norm", "loss scaling", "layers to send as factors"],
)
def test_what_the_nodes_must_have_alike_is_compared(what):
    """Stories: fp16 on one node scaled its gradients alone; a compiled model's layers are watched on no node."""

    def work(link):
        mine, engine = job(link.rank, what), Engine()
        if link.rank and what == "loss scaling":
            engine.numerics = engine.numerics.parse(["fp16"])
        engine.open(mine.model, mine.optimizer, mine.loss)
        if link.rank and what == "layers to send as factors":
            engine.buckets = [messages.Bucket(s.index, s.names, s.shapes) for s in engine.buckets]
        compare(link, mine, engine, Exchange(), parse("codec", "none"))

    if not what:
        ranks.run(2, work)
        return
    with pytest.raises(ValueError, match=f"the nodes were given different {what.removeprefix('kind of ')}"):
        ranks.run(2, work)


def test_more_named_parts_of_a_loss_than_a_ballot_holds_are_refused():
    """Story: votes of a rank with rows were longer than those of a rank without."""
    most = Vote.MAX_TERMS
    parts = {f"part {i}": torch.ones(()) for i in range(most)}
    assert judged(lambda output, target: parts, None, (torch.ones(4, 1), torch.ones(4)))[2] == 4.0
    parts["one more"] = torch.ones(())
    with pytest.raises(ValueError, match=f"the loss returned {most + 1} parts, at most {most} are added up"):
        judged(lambda output, target: parts, None, (torch.ones(4, 1), torch.ones(4)))


def doubled(self, x):
    return F.linear(2 * x, self.weight, self.bias)


@pytest.mark.parametrize("when", ["before joining", "afterwards"])
def test_a_layer_with_a_forward_of_its_own_has_its_own_gradient(when):
    """Story: its factors were taken for those of a fully-connected layer, and nothing else was left to see."""
    model = build()
    other = copy.deepcopy(model)
    other.second.forward = MethodType(doubled, other.second)
    want, _ = reference(other, BATCHES)

    def work(link):
        rank = Rank(link, other if when == "before joining" else model)
        rank.model.second.forward = MethodType(doubled, rank.model.second)
        rank.train(BATCHES)
        rank.exchange.close()
        return rank.state()

    assert all(gap(state, want) < 1e-12 for state in ranks.run(2, work))
