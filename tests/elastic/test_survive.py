"""A node failure at any moment costs the survivors one step at most, and does not change the result."""

import threading

import pytest
import torch

import ranks
from device import waits_in_backward
from nodes import IN, OPTIMIZERS, Normed, Plain, Rank, build, gap, reference, rows
from paceline import transport
from paceline.checkpoint import codec_state, transfer
from paceline.checkpoint.checkpoint import CheckpointError, read, write
from paceline.checkpoint.transfer import CheckpointTransfer, MembersChanged
from paceline.data.load_balance import Limits
from paceline.elastic import assignment
from paceline.elastic.fault_tolerant import FaultTolerantControl
from paceline.engine.compute.evaluate import evaluate
from paceline.engine.sequential import Engine
from paceline.errors import LinkError
from paceline.exchange import allreduce
from paceline.exchange.flow.control import Control
from paceline.link import memory
from paceline.registry import parse

BATCHES = [rows(24, seed) for seed in range(6)]


class Killed(BaseException):
    pass


class Fate:
    """Planned failures: (generation, rank, operation), before its part of the operation is sent or after.

    ``deaf``: a rank that hears nothing more of the link on which somebody has died, not even what came through.
    """

    def __init__(self, *deaths, after=False, deaf=None):
        self.deaths, self.after, self.deaf = set(deaths), after, deaf
        self.lock, self.counts, self.died, self.fired = threading.Lock(), {}, set(), []

    def begins(self, generation, rank):
        with self.lock:
            number = self.counts[generation, rank] = self.counts.get((generation, rank), 0) + 1
            return (generation, rank, number) in self.deaths


class Mortal(transport.Link):
    """A memory link whose ranks fail as ``fate`` says."""

    def __init__(self, link, fate):
        self.link, self.fate = link, fate
        self.rank, self.size, self.generation = link.rank, link.size, link.generation
        self.hosts = link.hosts

    def lane(self, name):
        return Mortal(self.link.lane(name), self.fate)

    def _do(self, begin):
        dies = self.fate.begins(self.generation, self.rank)
        if dies and not self.fate.after:
            self._die()
        handle = begin()
        if dies:
            self._die()
        return Heard(self, handle)

    def _die(self):
        self.fate.fired.append((self.generation, self.rank))
        self.fate.died.add(self.generation)
        self.link.hub.kill(self.rank)
        raise Killed

    def sum(self, tensor, what="sum"):
        return self._do(lambda: self.link.sum(tensor, what))

    def max(self, tensor, what="max"):
        return self._do(lambda: self.link.max(tensor, what))

    def all_gather(self, tensor, what="all-gather", even=False):
        return self._do(lambda: self.link.all_gather(tensor, what, even))

    def reduce_scatter(self, tensor, what="reduce-scatter"):
        return self._do(lambda: self.link.reduce_scatter(tensor, what))

    def broadcast(self, tensor, root=0, what="broadcast"):
        return self._do(lambda: self.link.broadcast(tensor, root, what))

    def send(self, tensor, peer, tag=0):
        return self._do(lambda: self.link.send(tensor, peer, tag))

    def recv(self, tensor, peer, tag=0):
        return self._do(lambda: self.link.recv(tensor, peer, tag))

    def cost(self, operation, num_bytes):
        return self.link.cost(operation, num_bytes)


class Mortals(transport.Membership):
    def __init__(self, link, fate):
        self.members, self.fate = memory.Members(link), fate
        self.link = Mortal(link, fate)

    def reconfigure(self, admits=()):
        if (self.link.generation, self.link.rank) in self.fate.fired:
            raise Killed  # in one thread; another may have seen the death first, as a loss like anybody's
        view = self.members.reconfigure()
        self.link = Mortal(view.link, self.fate)
        return transport.View(self.link, view.previous)


class Heard(transport.Handle):
    def __init__(self, link, handle):
        self.link, self.handle = link, handle

    def done(self):
        return self.handle.done()

    def wait(self, deadline_s=None):
        result = self.handle.wait(deadline_s)
        if self.link.rank == self.link.fate.deaf and self.link.generation in self.link.fate.died:
            raise LinkError("heard nothing")
        return result


def train(
    size, fate, model, optimizer="momentum", codec="none", shares=None, batch_norm="local", exchange="allreduce", **how
):
    """Per rank its losses, weights and view changes; None for ranks that failed."""

    def work(link):
        engine, news = Engine(), []
        its_exchange, members = parse("exchange", exchange), Mortals(link, fate)
        control = FaultTolerantControl(Control(members), [its_exchange.rebuild, engine.reopen])
        rank = Rank(
            members.link,
            model,
            OPTIMIZERS[optimizer],
            exchange=its_exchange,
            members=members,
            control=control,
            codec=codec,
            shares=shares,
            engine=engine,
            batch_norm=batch_norm,
            **how,
        )
        limits = [Limits((1,) * size, (24,) * size)]

        def regrouped(what):
            news.append(what)
            rank.run.assignment, _, limits[0] = assignment.regroup(rank.run.assignment, None, 24, limits[0], what)

        control.rows = lambda: rank.run.assignment.rows_per_node(24)[rank.run.assignment.node]
        control.on_view_change = regrouped
        fate.counts.pop((0, link.rank), None)  # from here on operations count
        try:
            return rank.train(BATCHES), rank.state(), news, control.num_view_changes
        except Killed:
            return None
        finally:
            its_exchange.close()

    return ranks.run(size, work)


def check(results, fate, model, optimizer="momentum"):
    left = [result for result in results if result]
    assert len(fate.fired) == len(fate.deaths)
    assert len(left) == len(results) - len(fate.fired)
    for losses, state, news, regroups in left:
        assert losses == left[0][0]
        assert all(torch.equal(state[name], left[0][1][name]) for name in state)
        assert 1 <= len(news) <= len(fate.fired)  # two deaths may be one loss
        assert len(news[-1].previous_ranks) == len(left)
        assert regroups <= len(fate.fired)  # a step each, at most
    want, want_losses = reference(model, BATCHES, OPTIMIZERS[optimizer])
    assert left[0][0] == pytest.approx(want_losses, rel=1e-9)
    assert gap(left[0][1], want) < 1e-9


@pytest.mark.dear("True", "False-2", "False-0")
@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("after", [False, True])
def test_any_rank_may_die_at_any_operation(victim, after):
    """Two steps have about ten operations: a rank fails at each of them."""
    model = build(Plain)
    for number in range(1, 11):
        fate = Fate((0, victim, number), after=after)
        check(train(3, fate, model), fate, model)


@pytest.mark.dear("2")
@pytest.mark.parametrize("deaf", [0, 2])
def test_a_vote_that_came_through_for_one_came_through_for_all(deaf):
    """Rank 1 fails once its part is sent; one of the others receives it, the other does not."""
    model, late = build(Plain), 0
    for number in range(1, 11):
        fate = Fate((0, 1, number), after=True, deaf=deaf)
        results = train(3, fate, model)
        check(results, fate, model)
        late += results[deaf][3] == 0
    assert late, "nobody ended a step by what others had heard"


@pytest.mark.parametrize(
    "how",
    [
        {"exchange": "allreduce:forms=factors"},
        {"exchange": "allreduce:forms=dense", "optimizer": "adam"},
        {"shares": (3.0, 2.0, 1.0)},
    ],
    ids=str,
)
def test_however_it_trains(how):
    model = build(Plain)
    for number in (2, 5, 6, 9):
        fate = Fate((0, 1, number))
        check(train(3, fate, model, **how), fate, model, how.get("optimizer", "momentum"))


@pytest.mark.parametrize("codec", ["half", "feedback/topk:keep=0.2", "feedback/lowrank:1", "qsgd"])
def test_with_a_codec_the_replicas_stay_equal(codec):
    """The residual of the failed rank is lost with it."""
    model = build(Plain)
    for number in (3, 6, 8):
        fate = Fate((0, 2, number), deaf=0, after=True)
        left = [result for result in train(3, fate, model, codec=codec) if result]
        assert len(left) == 2
        assert left[0][0] == left[1][0]
        assert all(torch.equal(value, left[1][1][name]) for name, value in left[0][1].items())


@waits_in_backward
def test_with_batch_norm_over_everyone():
    model = build(Normed)
    for number in (1, 2, 3, 7, 12):
        fate = Fate((0, 1, number))
        results = train(3, fate, model, batch_norm="sync")
        left = [result for result in results if result]
        (want,) = train(1, Fate(), model)
        assert fate.fired == [(0, 1)]
        assert len(left) == 2
        for result in left:
            assert result[0] == pytest.approx(want[0], rel=1e-9)
            assert gap(result[1], want[1]) < 1e-9


def test_one_after_another_until_one_is_left():
    model = build(Plain)
    for second in (1, 2, 3, 5):
        fate = Fate((0, 0, 4), (1, 1, second))
        check(train(3, fate, model), fate, model)


def test_words_are_those_of_who_is_left_and_a_refused_step_is_no_loss():
    def work(link):
        fate = fates[0]
        exchange, members = allreduce.Exchange(), Mortals(link, fate)
        control = FaultTolerantControl(Control(members), [exchange.rebuild])
        rank = Rank(members.link, build(Plain), exchange=exchange, members=members, control=control)
        fate.counts.pop((0, link.rank), None)
        try:
            said = control.all_gather(f"rank {link.rank}".encode())
            return said, control.all_reduce([1.0]), control.num_view_changes
        except Killed:
            return None
        finally:
            exchange.close()
            del rank

    fates = [Fate((0, 1, 1))]
    gone = ranks.run(3, work)
    assert gone == [([b"rank 0", b"rank 2"], [2.0], 1), None, ([b"rank 0", b"rank 2"], [2.0], 1)]


class Numbered(torch.utils.data.Dataset):
    """Sample i is one whose metric is 2**i: a sum says which were counted."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.zeros(IN, dtype=torch.float64), 2.0**i


def whatever(size, fate, does):
    """The results of ``does(control, rank)`` on the survivors."""

    def work(link):
        engine, exchange, members = Engine(), allreduce.Exchange(), Mortals(link, fate)
        control = FaultTolerantControl(Control(members), [exchange.rebuild, engine.reopen])
        rank = Rank(members.link, build(Plain), exchange=exchange, engine=engine, members=members, control=control)
        limits = [Limits((1,) * size, (24,) * size)]

        def regrouped(what):
            rank.run.assignment, _, limits[0] = assignment.regroup(rank.run.assignment, None, 24, limits[0], what)

        control.rows = lambda: rank.run.assignment.rows_per_node(24)[rank.run.assignment.node]
        control.on_view_change = regrouped
        fate.counts.pop((0, link.rank), None)
        try:
            return does(control, rank)
        except Killed:
            return None
        finally:
            exchange.close()

    return ranks.run(size, work)


@pytest.mark.parametrize(("victim", "deaf"), [(0, None), (1, 0), (1, 2), (2, 1)])
def test_wherever_one_dies_all_others_count_every_sample_once(victim, deaf):
    def does(control, rank):
        said = []
        while len(said) < 5:  # who is deaf must not be the last to hear
            control.broadcast(rank.engine.buffers)
            seat = rank.run.assignment
            found = evaluate(rank.model, rank.engine, control, seat, Numbered(), lambda _, y: (y.sum(), len(y) / 24), 3)
            if found is not None:
                said.append(round(found))
        return said

    for number in range(1, 8):
        fate = Fate((0, victim, number), after=number % 2 > 0 or deaf is not None, deaf=deaf)
        results = [each for each in whatever(3, fate, does) if each is not None]
        assert fate.fired
        assert results == [[2**24 - 1] * 5] * 2, number


@pytest.mark.parametrize("victim", range(3))
def test_wherever_one_dies_while_a_checkpoint_is_sent_the_others_leave_off_together(tmp_path, monkeypatch, victim):
    """They begin again, also where some learned of the failure before, and began as the survivors."""
    monkeypatch.setattr(transfer, "PART_BYTES", 1000)
    run, fired, ends = write(tmp_path, 7, {"w": torch.arange(500.0)}, {"facts": {}}), 0, {}

    def does(control, rank):
        control.all_gather(b"before")
        seat, team = rank.run.assignment, control.generation
        said = "sent"
        try:
            CheckpointTransfer(seat.node, range(seat.num_nodes), control.all_gather, team).send(
                None if seat.node else read(run), (1, 2)
            )
        except MembersChanged:
            said = "again"
        except CheckpointError as error:
            said = str(error)
        for _ in range(3):  # who is deaf must not be the last to hear
            control.all_gather(b"after")
        return said

    for number in range(3, 12):
        for deaf in (None, (victim + 1) % 3):
            fate = Fate((0, victim, number), after=deaf is not None, deaf=deaf)
            results = [each for each in whatever(3, fate, does) if each is not None]
            assert len(results) == 3 - len(fate.fired), (number, deaf)
            assert len(set(results)) == 1, (number, deaf, results)
            ends[results[0]] = ends.get(results[0], 0) + 1
            fired += len(fate.fired)
    assert fired == 18
    assert ends.keys() <= {"again", "sent"}
    assert ends["again"] > 6


def test_who_enters_takes_part_in_all_that_the_others_do():
    """Also where a member has missed the end of the previous operation: it then receives the result from the others."""

    class Same(transport.Membership):
        def __init__(self, link):
            self.link = link

        def reconfigure(self, admits=()):
            return transport.View(self.link, (0, 1))

    def work(link):
        surviving = FaultTolerantControl(Control(Same(link)), [])
        surviving.operation_number, surviving.last_result = ((5, b"five"), (4, b"four"), (0, b""))[link.rank]
        found = []
        if link.rank == 2:
            surviving.enter()
        else:
            surviving._rejoin("a failure", found.append)
        everyone = link.all_gather(torch.tensor([link.rank + 1]), "what comes next").wait()
        return surviving.operation_number, surviving.last_result, found, [int(each) for each in everyone]

    want = [(5, b"five", [b"five"] if rank == 1 else [], [1, 2, 3]) for rank in range(3)]
    assert ranks.run(3, work) == want


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("after", [False, True])
def test_wherever_one_dies_what_the_others_codecs_remember_is_brought_together(victim, after):
    fired = 0
    for number in range(1, 10):
        fate, had = Fate((0, victim, number), after=after), []

        def does(control, rank, had=had):
            mine = {0: torch.full((3,), float(rank.run.assignment.node)), 1: torch.ones(2)}
            found = codec_state.collect(control, lambda: rank.run.link, mine)
            had += [[float(each[0][0]) for each in found]] if found else []
            generation = control.generation
            control.all_gather(b"")
            return generation

        results = [each for each in whatever(3, fate, does) if each is not None]
        assert len(results) == 3 - len(fate.fired)
        assert len(set(results)) == 1
        if results[0]:
            assert had == [[float(rank) for rank in range(3) if rank != victim]], number
        else:  # all was brought together before, and may have died with rank 0
            assert had == [[0.0, 1.0, 2.0]] or not (had or victim), number
        fired += len(fate.fired)
    assert fired > 3
