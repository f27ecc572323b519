"""Whoever computes which rows, and however often that changes: the training is that of one process."""

import itertools
import time

import pytest
import torch
from norms import Normed, optimizer
from torch.nn import functional as F

import ranks
from device import waits_in_backward
from nodes import MODELS, OPTIMIZERS, Plain, Rank, Whole, build, gap, reference, rows
from paceline.data import sampler
from paceline.data.batches import batches
from paceline.data.load_balance import LoadBalancer
from paceline.elastic.assignment import place, settle
from paceline.engine.replicas import Engine as Replicas
from paceline.environment import LaunchEnvironment
from paceline.job import Job
from paceline.link import gloo, memory
from paceline.messages import DENSE, FACTORS
from paceline.report.record import Record, read

WHOLE = [rows(32, seed) for seed in range(4)]


def train(model, shares, data=WHOLE, **options):
    engines = [options.pop("engine", None) or (lambda: None)] * len(shares)

    def work(link):
        rank = Rank(link, model, shares=shares, batch=32, engine=engines[link.rank](), **options)
        losses = rank.train(data)
        forms = list(rank.exchange.forms())
        rank.exchange.close()
        rank.engine.close()
        return rank.state(), losses, forms

    return ranks.run(len(shares), work)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shares", [(24, 8), (8, 24), (31, 1), (32, 0)])
def test_24_and_8_rows_are_32(kind, shares):
    model = build(MODELS[kind])
    want, want_losses = reference(model, WHOLE)
    for state, losses, _ in train(model, shares):
        assert gap(state, want) < 1e-11
        assert losses == pytest.approx(want_losses, rel=1e-11)
    if kind == "plain":
        assert train(model, shares)[0][2].count(FACTORS) == 2


@waits_in_backward
@pytest.mark.parametrize("engine", [None, lambda: Replicas(2)])
def test_24_and_8_rows_are_32_for_batch_norm_too(engine):
    model = build(Normed)
    want, want_losses = reference(model, WHOLE, optimizer)
    for state, losses, _ in train(model, (24, 8), optimizer=optimizer, batch_norm="sync", engine=engine):
        assert gap(state, want) < 1e-10
        assert losses == pytest.approx(want_losses, rel=1e-10)


@pytest.mark.parametrize("shares", [(24, 8), (32, 0)])
def test_weights_averaged_at_every_step_are_weighted_by_rows(shares):
    want, _ = reference(build(), WHOLE, OPTIMIZERS["sgd"])

    def work(link):
        rank = Rank(link, build(), OPTIMIZERS["sgd"], shares=shares, batch=32, exchange="local_sgd:1")
        for data in WHOLE:
            rank.step(Whole(data))
        return rank.state()

    for state in ranks.run(2, work):
        assert gap(state, want) < 1e-11


@waits_in_backward
def test_waiting_for_others_in_the_middle_of_a_step_is_not_a_nodes_own_time():
    """Batch norm over everyone makes both nodes end together; the one that sleeps is known all the same."""
    seen = []

    def work(link):
        def loss(output, target):
            time.sleep(0.1 * link.rank)
            return F.cross_entropy(output, target)

        rank = Rank(link, build(Normed), optimizer, shares=(16, 16), batch=32, batch_norm="sync", loss=loss)
        collect = rank.exchange.collect
        rank.exchange.collect = lambda vote: seen.append((link.rank, vote.seconds, vote.busy)) or collect(vote)
        rank.train(WHOLE)
        rank.exchange.close()

    ranks.run(2, work)
    assert min(seconds for _, seconds, _ in seen) > 0.09
    quick = sorted(busy for rank, _, busy in seen if not rank)
    assert quick[1] < 0.06
    assert min(busy for rank, _, busy in seen if rank) > 0.09


def test_forms_are_chosen_anew_for_other_shares_by_everyone_alike(monkeypatch):
    """Factors of 18 rows a node are fewer bytes than the sum; those of 48 rows are not."""
    monkeypatch.setattr(memory.Link, "cost", gloo.Link.cost)  # sums go round a ring
    data = [rows(54, seed) for seed in range(6)]
    model = build()

    def work(link):
        rank = Rank(link, model, batch=54)
        rank.train(data[:3])
        before = list(rank.exchange.forms())
        rank.run.assignment = sampler.Assignment(link.rank, 3, shares=(48, 3, 3))
        rank.exchange.on_assignment(48 / 54)
        after = list(rank.exchange.forms())
        rank.train(data[3:])
        rank.exchange.close()
        assert list(rank.exchange.forms()) == after
        return before, after, rank.state()

    results = ranks.run(3, work)
    want, _ = reference(model, data)
    for before, after, state in results:
        assert before.count(FACTORS) == 2
        # 128 x 128: 48 x 256 > 2 / 3 x 128 x 128
        assert set(after) == {DENSE}
        assert (before, after) == results[0][:2]
        assert gap(state, want) < 1e-11


class Numbered:
    """Rows that may be fetched ahead; the label is the sample's number, of which the class follows."""

    def __init__(self, count):
        self.x = rows(count, 3)[0]

    def __len__(self):
        return len(self.x)

    def fetch(self, indices, epoch):
        return self.x[indices], torch.as_tensor(indices)


class MapStyle(Numbered):
    """One by one, or by processes."""

    def __getitem__(self, i):
        return self.x[i], i

    fetch = None


def entropy(output, target):
    return F.cross_entropy(output, target % 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slowed_node_gets_fewer_rows_and_them_back_and_every_sample_counts_once(workers, tmp_path):
    """Node 1 sleeps four times as long per row until the shares have changed, then as long as the other."""
    count, epochs = 24 * 7 + 5, 40  # the last batch of an epoch is short
    source = MapStyle(count) if workers else Numbered(count)
    if workers:
        del MapStyle.fetch  # a map-style dataset
    model = build(Plain)

    def work(link):
        step, mine = [0], {}

        def loss(output, target):
            slow = 4 if link.rank and not rank.redealt else 1
            time.sleep(0.001 * slow * len(target))
            mine[step[0]] = target.tolist()
            return entropy(output, target)

        record = Record(tmp_path if not link.rank else None)
        rank = Rank(link, model, OPTIMIZERS["sgd"], loss=loss, record=record)
        rank.redealt, shares, losses = 0, [(12, 12)], []
        rank.run.balance = LoadBalancer(24, [1, 1], [24, 24])
        made = batches(source, 24, epochs, 3, lambda: rank.run.assignment, workers=workers)
        for batch in made:
            vote = rank.step(batch).vote
            losses.append(vote.loss_sum / vote.weight)
            shares.append(rank.run.assignment.rows_per_node(24))
            step[0] += 1
            rank.redealt = rank.redealt or (shares[-1][1] < 12 and shares[-1][1])
            if rank.redealt and shares[-1][1] > rank.redealt:
                break
        made.close()
        rank.exchange.close()
        return mine, shares, losses, rank.state()

    (one, shares, losses, state), (other, its_shares, its_losses, its_state) = ranks.run(2, work)
    assert shares == its_shares
    assert losses == its_losses
    assert all(torch.equal(state[name], its_state[name]) for name in state)
    first = next(at for at, (_, slow) in enumerate(shares) if slow < 12)
    assert first < 60
    assert shares[first][1] < 10, "the slow node has not given rows away"
    assert shares[-1][1] > shares[first][1], "it has not got any back"
    assert len(shares) < first + 100
    # every sample of every epoch once, in its place
    turns = [sampler.permutation(3, epoch, count) for epoch in range(epochs)]
    expected = [turn[at : at + 24].tolist() for turn in turns for at in range(0, count, 24)][: len(losses)]
    assert [one.get(step, []) + other.get(step, []) for step in range(len(losses))] == expected
    data = [(source.x[turn], torch.tensor(turn)) for turn in expected]
    want, want_losses = reference(model, data, OPTIMIZERS["sgd"], loss=entropy)
    assert losses == pytest.approx(want_losses, rel=1e-10)
    assert gap(state, want) < 1e-9
    told = [event for event in read(tmp_path) if event["event"] == "shares"]
    slowed = next(event for event in told if event["new"][1] < 12)
    changes = [now for before, now in itertools.pairwise(shares) if now != before]
    assert [tuple(event["new"]) for event in told] == changes
    assert [tuple(event["old"]) for event in told] == [(12, 12), *changes[:-1]]
    assert slowed["step"] == first
    assert slowed["per_s"][0] > 1.5 * slowed["per_s"][1]
    assert slowed["expected_s"] < slowed["step_s"]
    assert "node 1 was the slowest" in slowed["reason"]


def test_nodes_that_average_every_other_step_deal_anew_too():
    """Node 1 sleeps four times as long per row. Both deal alike, from the step after a meeting on."""

    def work(link):
        def loss(output, target):
            time.sleep(0.0005 * (4 if link.rank else 1) * len(target))
            return entropy(output, target)

        rank = Rank(link, build(Plain), OPTIMIZERS["sgd"], exchange="local_sgd:2", loss=loss)
        rank.run.balance, shares = LoadBalancer(24, [1, 1], [24, 24]), [(12, 12)]
        made = batches(Numbered(24 * 7), 24, 20, 3, lambda: rank.run.assignment)
        for batch in made:
            rank.step(batch)
            shares.append(rank.run.assignment.rows_per_node(24))
            if shares[-1] != shares[-2]:
                break
        made.close()
        return shares

    one, other = ranks.run(2, work)
    assert one == other
    assert one[-1][1] < 10, "the slow node has not given rows away"
    steps = len(one) - 1
    assert steps % 2 == 1


# Where training begins.


class Said:
    """An exchange through which every node said this."""

    def __init__(self, *everyone):
        self.everyone = everyone

    def all_gather(self, words):
        return [str([node, *each]).encode() for node, each in enumerate(self.everyone)]


def job(model=None, **options):
    model = model or Plain()
    return Job(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, 32, **options)


def test_a_node_has_no_more_rows_than_it_can_take_from_the_beginning():
    mine = job(most_rows=6)
    rank = Rank(*ranks_of_one(), build())
    assignment, balance, _ = settle(
        place(mine, LaunchEnvironment(num_nodes=2)), mine, rank.engine, Said((1, 6), (1, 32))
    )
    assert assignment.rows_per_node(32) == (6, 26)
    assert (balance.least, balance.most) == ((1, 1), (6, 32))
    for options, said, message in (
        ({}, ((1, 6), (1, 20)), r"batch_size is 32, and the nodes take at most 6 \+ 20 rows"),
        ({"shares": (3.0, 1.0)}, ((1, 6), (1, 32)), r"give node 0 24 of 32 rows, and its most_rows is 6"),
    ):
        asked = job(**options)
        with pytest.raises(ValueError, match=message):
            settle(place(asked, LaunchEnvironment(num_nodes=2)), asked, rank.engine, Said(*said))


def ranks_of_one():
    from paceline.link.memory import world

    return world(1)


def test_shares_for_another_number_of_nodes_are_told_and_one_node_needs_none():
    with pytest.raises(ValueError, match=r"shares=\(3\.0, 1\.0\) are for 2 nodes, and the run has 3"):
        place(job(shares=(3.0, 1.0)), LaunchEnvironment(num_nodes=3))
    assert place(job(shares=(3.0, 1.0)), LaunchEnvironment()).shares is None


def test_fixed_shares_stay_and_batch_norm_keeps_two_rows_for_each_pass():
    engine = Rank(*ranks_of_one(), build()).engine
    for shares in ("equal", (3.0, 1.0)):
        asked = job(shares=shares)
        assert settle(place(asked, LaunchEnvironment(num_nodes=2)), asked, engine, Said((1, 32), (1, 32)))[1] is None
    asked = job(Normed(), accumulate=3)
    told = []
    exchange = Said((6, 32), (6, 32))
    exchange.all_gather = lambda words: told.append(words) or Said.all_gather(exchange, words)
    _, balance, _ = settle(place(asked, LaunchEnvironment(num_nodes=2)), asked, engine, exchange)
    assert told == [b"[0, 6, 32]"]
    assert balance.least == (6, 6)
