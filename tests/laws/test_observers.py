"""Who observes a step is told of all of it, in one order, and changes nothing but what its hooks give back."""

import pytest
import torch

import paceline
import ranks
from nodes import OPTIMIZERS, Rank, Whole, build, rows
from paceline.exchange.allreduce import Exchange
from paceline.messages import Decision
from paceline.report.step_observer import StepObserver

BATCHES = [rows(24, seed) for seed in range(3)]
BEGIN, TRY, END = ["takes", "reads"], ["offering", "votes"], ["applies", "applied", "updated", "ends"]


class Noted(StepObserver):
    """Notes what it is told, under its name, in a list that several share."""

    def __init__(self, name="", told=None):
        self.name, self.told, self.pieces = name, [] if told is None else told, 0

    def note(self, what):
        self.told.append(self.name + what)

    def takes(self, batch, own):
        self.note("takes own" if own else "takes")
        return batch

    def reads(self, batch, own):
        self.note("reads own" if own else "reads")
        return batch

    def offering(self, offer):
        self.note("offering")

        def offered(gradient):
            self.pieces += 1
            offer(gradient)

        return offered

    def votes(self, vote):
        self.note("votes")

    def again(self, step, outcome):
        assert outcome.decision is Decision.RETRY
        self.note("again")

    def applies(self, outcome, rule):
        self.note("applies")
        return lambda: self.note("applied")

    def updated(self, outcome):
        self.note("updated")

    def ends(self, summary):
        assert summary.outcome.decision in (Decision.COMMIT, Decision.SKIP)
        self.note("ends")


class Refusing(Exchange):
    """The second vote is a refusal."""

    votes = 0

    def collect(self, vote):
        self.votes += 1
        vote.ok = vote.ok and self.votes != 2
        return super().collect(vote)


def observed(link, observers, batches=BATCHES, exchange="allreduce"):
    rank = Rank(link, build(), OPTIMIZERS["adam"], exchange)
    rank.run.observers += observers
    rank.train(batches)
    rank.exchange.close()
    return rank.state()


def test_every_process_is_told_of_every_part_of_a_step():
    def work(link):
        noted, rank = Noted(), Rank(link, build())
        rank.run.observers.append(noted)
        rank.train(BATCHES[:2])
        rank.exchange.close()
        return noted.told, noted.pieces, len(rank.engine.buckets)

    for told, gradients, num_specs in ranks.run(2, work):
        assert told == 2 * (BEGIN + TRY + END)
        assert gradients == 2 * num_specs


def test_a_refused_step_begins_and_ends_once():
    def work(link):
        noted = Noted()
        observed(link, [noted], BATCHES[:2], Refusing())
        return noted.told

    assert ranks.run(2, work) == [BEGIN + TRY + END + BEGIN + TRY + ["again"] + TRY + END] * 2


def test_all_are_told_in_one_order():
    def work(link):
        told = []
        observed(link, [Noted("one ", told), Noted("two ", told)], BATCHES[:1])
        return told

    for told in ranks.run(2, work):
        assert [words.partition(" ")[0] for words in told] == ["one", "two"] * (len(told) // 2)
        assert [words.partition(" ")[2] for words in told[::2]] == BEGIN + TRY + END


def test_whoever_only_looks_changes_no_bit():
    def work(link, observers):
        return observed(link, [each() for each in observers])

    with_none, with_some = (
        ranks.run(2, lambda link, given=given: work(link, given)) for given in ((), (StepObserver, Noted))
    )
    for one, other in zip(with_none, with_some, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_takes_gives_back_is_what_is_computed():
    """As a trial does, which sees a part of each batch."""

    class Half(StepObserver):
        def takes(self, batch, own):
            return Whole([part[:12] for part in batch.data])

    def work(link):
        return observed(link, [Half()]), observed(link.lane("alone"), [], [[p[:12] for p in b] for b in BATCHES])

    for half, want in ranks.run(2, work):
        assert all(torch.equal(half[name], want[name]) for name in want)


def test_a_step_that_nothing_counts_in_updates_nothing():
    noted = Noted()

    def work(link):
        empty = Whole([part[:0] for part in BATCHES[0]])
        empty.weight = 24.0
        rank = Rank(link, build())
        rank.run.observers.append(noted)
        with pytest.raises(RuntimeError, match="trains nothing"):
            rank.step(empty)
        rank.exchange.close()

    ranks.run(1, work)
    assert noted.told == BEGIN + TRY


def test_a_loop_of_the_users_own_reads_before_its_step():
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)  # SGD is offered factors first, and a loop like this has none
    noted = Noted()
    with paceline.join(model, optimizer, batch_size=24, engine="sequential") as pace:
        pace.run.observers.append(noted)
        data = torch.utils.data.TensorDataset(*BATCHES[0])
        for batch in pace.batches(data):
            x, y = pace.rows(batch)
            pace.backward(torch.nn.functional.cross_entropy(model(x), y))
            pace.update()
    assert noted.told == ["reads own", "takes own", *TRY, *END]
