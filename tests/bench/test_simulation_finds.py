"""The simulation can fail: mistakes are planted, one at a time, and each is found within a few schedules."""

import dataclasses
from dataclasses import replace

import pytest

from paceline.elastic import assignment
from paceline.elastic.fault_tolerant import FaultTolerantControl
from paceline.elastic.quorum import MemberHistory, MemberStatus, QuorumDecision, QuorumVerdict
from paceline.engine.node.divided_optimizer import DividedOptimizer
from paceline.engine.node.local_control import LeaderControl
from paceline.engine.node.local_exchange import LocalLeader
from paceline.errors import LinkError
from paceline.exchange import allreduce, diloco, server
from paceline.exchange.flow.control import Control, counted
from paceline.messages import Decision as Outcome
from paceline.messages import Gradient, StepOutcome, Vote
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
        (DEATH, "server"),
        (PARTITION, "server"),
        (PARTITION, "factors"),
        (DEATH, "hybrid"),
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
    monkeypatch.setattr(diloco.Exchange, "average", lambda self, *given: None)
    assert found(struck(DEATH, "diloco", 1))


def test_an_average_that_one_rank_leaves_out(monkeypatch):
    """Planted: it takes part, and keeps its own weights."""
    average = Rank._average

    def lazy(self, compute, *given):
        targets = average(self, compute, *given)
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


def test_a_copy_of_a_part_whose_sum_did_not_arrive(monkeypatch):
    """Planted: the node that has the copy updates it by its own gradient."""
    run = server.Push.run

    def own(self, bucket, values, state, context):
        before, length = values.clone(), -(-bucket.numel // context.size)
        coded = yield from run(self, bucket, values, state, context)
        part = (context.rank - 1) % context.size
        copy = slice(part * length, (part + 1) * length)
        if not self.to_all:
            coded.total[copy] = before[copy]
        return coded

    monkeypatch.setattr(server.Push, "run", own)
    assert found(struck(DEATH, "server"))


def test_a_part_whose_state_is_forgotten_when_parts_are_divided_anew(monkeypatch):
    assembled = DividedOptimizer.assemble

    def forgetful(self, states):
        return assembled(self, {shard: {} for shard in states})

    monkeypatch.setattr(DividedOptimizer, "assemble", forgetful)
    assert found(struck(DEATH, "server"))


def test_parts_that_are_divided_before_all_know_by_which_ranks(monkeypatch):
    """Planted: at the beginning of a step, which some begin among others than those who have begun it before."""
    begin = server.Exchange.begin

    def early(self):
        if self.link.size > 1 and not self._divided:
            self._divide()
        begin(self)

    monkeypatch.setattr(server.Exchange, "begin", early)
    # the second death strikes those who collect the parts of the first
    assert found(Schedule(27_000 + later, 5, {27: DEATH, 27 + later: DEATH}, "server") for later in range(28, 40))


def test_survivors_that_serve_the_parts_of_before(monkeypatch):
    """Planted: after a loss sums go to the node that has the number of a part's server, and not to all."""
    begin = server.Exchange.begin

    def stubborn(self):
        begin(self)
        self.push.to_all = False

    monkeypatch.setattr(server.Exchange, "begin", stubborn)
    assert found(struck(DEATH, "server", size=4))


def test_new_weights_that_one_node_does_not_take(monkeypatch):
    collect = Rank._collect

    def lazy(self, compute, *given):
        targets = collect(self, compute, *given)
        return [] if targets and self.id == 1 else targets

    monkeypatch.setattr(Rank, "_collect", lazy)
    assert found(struck(DELAY, "server", 3))


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


def test_processes_of_a_node_that_are_not_told_of_a_lost_node(monkeypatch):
    """Planted: its first process keeps the news to itself, so the others go on with the rows of before."""
    monkeypatch.setattr(LeaderControl, "_note", lambda self, change: self.on_view_change(change))
    assert found(struck(DEATH, "hybrid"))


def test_a_process_of_a_node_whose_part_is_not_added(monkeypatch):
    """Planted: a dense gradient of a node is that of its first process."""
    whole = LocalLeader.node_gradient

    def first(self, bucket, rows):
        gradient = whole(self, bucket, rows)
        return gradient if gradient.flat is None else Gradient(bucket, flat=self.places.flat(bucket).clone())

    monkeypatch.setattr(LocalLeader, "node_gradient", first)
    assert found([Schedule(0, 2, {}, "hybrid")])
