"""The simulation can fail: mistakes are planted, one at a time, and each is found within a few schedules."""

import dataclasses
from dataclasses import replace

import pytest

from paceline.elastic import assignment
from paceline.elastic.fault_tolerant import FaultTolerantControl
from paceline.elastic.quorum import MemberHistory, MemberStatus, QuorumDecision, QuorumVerdict
from paceline.errors import LinkError
from paceline.exchange import allreduce, diloco
from paceline.exchange.flow.control import Control, counted
from paceline.messages import Decision as Outcome
from paceline.messages import StepOutcome, Vote
from paceline.step.rebalance import Rebalance
from paceline_bench.simulated import assembly
from paceline_bench.simulated.fault_link import DEATH, DELAY, PARTITION, STALL
from paceline_bench.simulated.rank import Rank
from paceline_bench.simulated.scenarios import WAYS
from paceline_bench.simulated.schedule import Schedule
from paceline_bench.simulated.simulate import play


def struck(kind, way="factors", num_seeds=60, size=3):
    """Schedules in which one fault strikes, at each message in turn."""
    expected = WAYS[way].num_messages(size, 3)
    return [Schedule(seed, size, {seed % expected: kind}, way) for seed in range(num_seeds)]


def found(schedules):
    """Whether one of these breaks a law, all of which are kept without the mistake."""
    return any(play(each).violations for each in schedules)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (DEATH, "factors"),
        (DEATH, "topk"),
        (DEATH, "lowrank"),
        (DEATH, "qsgd"),
        (DELAY, "uneven"),
        (DEATH, "drifting"),
        (DEATH, "diloco"),
        (PARTITION, "diloco"),
        (PARTITION, "factors"),
    ],
)
def test_without_a_mistake_nothing_is_found(kind, way):
    assert not found(struck(kind, way, 30))


def test_those_who_are_left_forget_what_some_have_applied(monkeypatch):
    """Planted: after a loss the step is always computed again, though a rank that is left has applied it."""
    compare = FaultTolerantControl._compare
    monkeypatch.setattr(FaultTolerantControl, "_compare", lambda self: (None, *compare(self)[1:]))
    assert found(struck(DEATH))


def test_a_rank_that_leaves_before_all_know(monkeypatch):
    """Planted: whoever has applied the last step goes, and takes the knowledge along."""
    monkeypatch.setattr(Rank, "part", lambda self: None)
    monkeypatch.setattr(FaultTolerantControl, "_all_know", lambda self: None)
    assert found(struck(DEATH, num_seeds=150))


def test_a_step_that_is_applied_before_all_know_the_vote(monkeypatch):
    """Planted: who is cut off with everyone's votes applies what the others compute again."""
    monkeypatch.setattr(FaultTolerantControl, "_all_know", lambda self: None)
    assert found(struck(PARTITION, num_seeds=150))


def test_a_vote_that_is_told_in_a_meeting_and_applied_before_all_were_told(monkeypatch):
    """Planted: a partition strikes in the message that tells it, and one part of those who meet applies the step."""
    compare = FaultTolerantControl._compare
    schedule = Schedule(20448, 6, {61: DELAY, 79: PARTITION, 105: DEATH}, "reproducible")
    assert not found([schedule])
    monkeypatch.setattr(FaultTolerantControl, "_compare", lambda self: (*compare(self)[:2], False))
    assert found([schedule])


def test_a_refused_step_that_is_not_taken_back(monkeypatch):
    """Planted: those who are left go on with the next batch."""
    monkeypatch.setattr(FaultTolerantControl, "_retry", lambda self: StepOutcome(Outcome.SKIP))
    assert found(struck(DEATH))


def test_a_step_that_is_applied_before_it_is_agreed_on(monkeypatch):
    """Planted: whoever misses a vote counts its own alone."""
    ask = Control.vote

    def hasty(self, vote, finish):
        try:
            return ask(self, vote, finish)
        except LinkError:
            return finish(counted([vote.pack()]))

    monkeypatch.setattr(Control, "vote", hasty)
    assert found(struck(DEATH))


def test_a_batch_that_is_not_dealt_again(monkeypatch):
    """Planted: the seat among those who are left is the old one."""
    monkeypatch.setattr(Rank, "regroup", lambda self, news: None)
    assert found(struck(DEATH))


def test_a_node_that_keeps_its_old_share(monkeypatch):
    """Planted: of those who are left each takes more rows for its own than it has told the others."""
    regroup = assignment.regroup

    def stubborn(mine, balance, count, limits, news):
        own = news.previous_ranks.index(mine.node)
        rows = tuple(each + 6 * (node == own) for node, each in enumerate(news.rows))
        return regroup(mine, balance, count, limits, dataclasses.replace(news, rows=rows))

    monkeypatch.setattr(assignment, "regroup", stubborn)
    assert found(struck(DEATH, "uneven"))


def test_a_codec_that_remembers_a_refused_step(monkeypatch):
    """Planted: what was left out counts as owed as soon as it is sent, whether the step is applied or not."""
    receive = allreduce.Exchange.receive

    def early(self, flight, bucket):
        gradient, pending = receive(self, flight, bucket)
        self.remember([(gradient, pending)], Vote(weight=1.0, used=bytes([1]) * len(self.buckets) * 9))
        return gradient, pending

    monkeypatch.setattr(allreduce.Exchange, "receive", early)
    assert found(struck(DEATH, "topk"))


def test_an_average_that_is_applied_before_it_is_agreed_on(monkeypatch):
    """Planted: whoever has its sums applies them, though one that the others miss has died."""

    def hasty(self, compute):
        while True:
            try:
                return compute()
            except LinkError as error:
                self.recover(error)

    monkeypatch.setattr(FaultTolerantControl, "transact", hasty)
    assert found(struck(DEATH, "diloco"))


def test_an_outer_step_that_moves_although_it_is_refused(monkeypatch):
    """Planted: the outer optimizer's state is that of an average which was never applied."""
    combined = diloco.Exchange._combined

    def early(self, weights, share):
        targets = combined(self, weights, share)
        self.momentum = self._next[1]
        return targets

    monkeypatch.setattr(diloco.Exchange, "_combined", early)
    assert found(struck(DEATH, "diloco"))


def test_an_average_that_nobody_applies(monkeypatch):
    monkeypatch.setattr(diloco.Exchange, "average", lambda self, weights, now: None)
    assert found(struck(DEATH, "diloco", 1))


def test_an_average_that_one_rank_leaves_out(monkeypatch):
    """Planted: it takes part, and keeps its own weights."""
    average = Rank._average

    def lazy(self, compute, weights, now):
        targets = average(self, compute, weights, now)
        return [] if targets and self.id == 1 else targets

    monkeypatch.setattr(Rank, "_average", lazy)
    assert found(struck(DELAY, "diloco", 3))


def test_samples_that_count_again_in_the_next_average(monkeypatch):
    averaged = diloco.Exchange.averaged

    def kept(self):
        samples = self.samples
        averaged(self)
        self.samples = samples

    monkeypatch.setattr(diloco.Exchange, "averaged", kept)
    assert found(struck(DEATH, "diloco", 3))


def test_both_parts_of_a_run_go_on(monkeypatch):
    """Planted: whoever does not hear the others goes on without them."""

    def anyhow(found, minimum=1, names=()):
        settled = MemberStatus.EXPECTED not in found
        return QuorumDecision(QuorumVerdict.CONTINUE if settled else QuorumVerdict.WAIT, quorum=settled)

    monkeypatch.setattr(assembly, "decide", anyhow)
    assert found(struck(PARTITION))


def test_a_part_trusts_that_those_it_did_not_hear_have_ended_before_they_continued(monkeypatch):
    """Planted: what was silent once and has ended counts as if it had ended at once."""
    after, schedules = (
        MemberHistory.after,
        struck(PARTITION, num_seeds=60, size=2) + struck(STALL, num_seeds=60, size=2),
    )
    assert not found(schedules)
    monkeypatch.setattr(MemberHistory, "after", lambda self, *given: replace(after(self, *given), suspects=frozenset()))
    assert found(schedules)


def test_rank_0_goes_ahead_of_a_broadcast(monkeypatch):
    """Story: a broadcast is over for its root when it has been sent. Where a rank died in the vote before, and some
    had heard that vote, rank 0 was two operations ahead of the others, which raised an AssertionError; and of those
    who had received it some went on with it and some without."""

    def alone(self, tensors):
        while True:
            try:
                self.control.broadcast(tensors)
            except LinkError as error:
                self.num_view_changes += 1
                if self._rejoin(str(error), bytes) is not None:
                    return
            else:
                self._end(b"")
                return

    monkeypatch.setattr(FaultTolerantControl, "broadcast", alone)
    assert found(struck(DEATH, "drifting", 100))


def test_shares_that_move_after_a_meeting_of_all(monkeypatch):
    """Story: a message came so late that all met again, and nobody was lost. Who had heard the last vote in time had
    counted that step in the old generation, the others in the new: from then on some moved the shares a step earlier
    than others, samples were used twice, and others never."""
    always = property(lambda self: self.run.balance, lambda self, balance: None)
    monkeypatch.setattr(Rebalance, "_measured_for", always, raising=False)
    assert found(struck(DELAY, "uneven"))
