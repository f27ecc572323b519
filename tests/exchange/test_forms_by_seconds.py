"""Factors or dense, and the order on the wire, from what a link and a machine were measured to take."""

import itertools
import time

import pytest
import torch

import ranks
from nodes import HIDDEN, Rank, build, engine_of, gap, reference, rows
from paceline.exchange.allreduce import Exchange
from paceline.exchange.flow import send_order
from paceline.exchange.flow.autotuner import MIN_STEPS_IN_A_ROW
from paceline.exchange.flow.cost_model import Rates, choose, dense_cost, factor_cost, multiplication
from paceline.exchange.flow.costs import SAVES, SAVES_S, gathered, summed
from paceline.exchange.flow.wire_rates import LARGE_BYTES, SPAN, WireRates
from paceline.link import memory
from paceline.link.gloo import Link as TorchLink
from paceline.link.mpi import Link as MpiLink
from paceline.link.net.collective_override import CollectiveOverride
from paceline.link.net.collective_run import Collective, names
from paceline.messages import DENSE, FACTORS, Bucket, CommCost, Vote
from paceline.registry import parse
from paceline.transport import Handle, Link

LAYER = Bucket(0, ("fc.weight",), ((4096, 9216),), linear=True)
FLOPS = [1e-12 * 1.25**i for i in range(30)]  # seconds for each
GIGABIT, SLOW, FAST = 8e-9, 1.6e-7, 1e-10  # seconds per byte: 1 Gbit/s, 50 Mbit/s, 80 Gbit/s


def form(rows, size, per_byte, per_flop, now=()):
    rates = Rates(1e-4, per_byte, per_flop)
    return choose([LAYER], [rows], [rows * size], size, set(), False, rates, now)[0]


def test_bytes_decide_where_multiplying_is_cheap_and_multiplying_where_bytes_are():
    assert form(32, 2, GIGABIT, 2e-11) == FACTORS
    assert form(32, 2, SLOW, 2e-11) == FACTORS
    assert form(32, 2, FAST, 2e-10) == DENSE
    assert form(16, 8, GIGABIT, 1e-9) == DENSE, "eight nodes on slow cores rebuild more than they save"
    assert form(16, 8, GIGABIT, 2e-11) == FACTORS


def test_a_transformer_with_thousands_of_rows_never_sends_factors():
    layer = Bucket(0, ("mlp.weight",), ((1024, 256),), linear=True)
    for per_byte, per_flop in itertools.product((GIGABIT, SLOW, FAST), (1e-12, 1e-9)):
        rates = Rates(1e-4, per_byte, per_flop)
        assert choose([layer], [2048], [4096], 2, set(), False, rates, [FACTORS]) == [DENSE]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_what_is_assumed_of_a_link_is_what_gloo_s_and_the_ring_among_ours_say(size):
    for num_bytes in (4 * size, 40 * size, 4_000_000 * size):
        assumed, ours = summed(num_bytes, size), Collective("ring").cost(size, num_bytes)
        assert (assumed.steps, assumed.bytes) == (ours.steps, ours.bytes) == (2 * (size - 1), ours.in_sequence)
        gloo = asked_of(TorchLink, size)
        assert summed(num_bytes, size, gloo) == assumed
        assert (
            gathered(num_bytes, size, gloo)
            == gathered(num_bytes, size)
            == CommCost(2 * (size - 1), ours.steps / 2 * num_bytes)
        )


def asked_of(kind, size):
    """What a link would ask, of which no other rank is there."""
    link = kind.__new__(kind)
    link.size = size
    return link.cost


def test_mpi_s_fewer_messages_make_the_choice_where_messages_are_dear():
    """Of eight: gloo's sum and a gather have 14 messages each, MPI's sum has 6."""
    rates, chosen = Rates(0.1, FAST, 1e-15), {}
    for kind in (TorchLink, MpiLink):
        link_cost = asked_of(kind, 8)
        both = dense_cost(LAYER, 8, link_cost=link_cost), factor_cost(LAYER, 16, 8, link_cost=link_cost)
        assert both[0].steps == {TorchLink: 14, MpiLink: 6}[kind]
        (chosen[kind],) = choose([LAYER], [16], [128], 8, set(), False, rates, costs=lambda _, both=both: both)
    assert chosen == {TorchLink: FACTORS, MpiLink: DENSE}


def test_a_chosen_collective_s_cost_makes_the_choice():
    """Of eight nodes, by steps and bytes in sequence: where multiplying takes longer than a ring's sum, it may still be
    quicker than a tree's."""
    layer = Bucket(0, ("fc.weight",), ((1000, 1000),), linear=True)
    took = {}
    for name in names():

        def work(link, name=name):
            exchange = Exchange()
            chosen = CollectiveOverride(link, Collective(name))
            exchange.open(engine_of([layer]), chosen, parse("codec", "none"), rows=60)
            both = exchange.choice.both(layer)
            forms = []
            for per_flop in FLOPS:
                exchange.choice.rates, exchange.choice.requested = Rates(1e-3, 1e-8, per_flop), "measured"
                forms += exchange.choice._choose([DENSE])
            exchange.close()
            return both, forms

        ((whole, factors), forms), *others = ranks.run(8, work)
        cost = Collective(name).cost(8, 4_000_000)
        assert all(other[1] == forms for other in others), name
        assert (whole.steps, whole.bytes, whole.in_sequence) == (cost.steps, cost.bytes, cost.serial_bytes)
        assert whole.flops == 0, "adding is in what a byte takes"
        whole_s = cost.steps * 1e-3 + cost.serial_bytes * 1e-8
        for per_flop, form in zip(FLOPS, forms, strict=True):
            factors_s = factors.steps * 1e-3 + factors.bytes * 1e-8 + factors.flops * per_flop
            wins = whole_s - factors_s > max(SAVES_S, SAVES * max(whole_s, factors_s))
            assert form == (FACTORS if wins else DENSE), (name, per_flop)
        took[name] = tuple(forms)
    assert took["binomial"] != took["ring"]


@pytest.mark.parametrize("now", [DENSE, FACTORS])
def test_a_form_stays_where_the_other_saves_little(now):
    """At this speed both cost the same; near it nothing changes, far from it either form gives way."""
    dense, factors = dense_cost(LAYER, 2), factor_cost(LAYER, 32, 2)
    even = (dense.bytes - factors.bytes) * GIGABIT / factors.flops
    for near in (0.9, 1.0, 1.1):
        assert form(32, 2, GIGABIT, even * near, [now]) == now
    assert form(32, 2, GIGABIT, even * 2, [now]) == DENSE
    assert form(32, 2, GIGABIT, even / 2, [now]) == FACTORS


def test_the_wire_is_known_from_its_pieces_and_followed_when_it_changes():
    sizes = [1 << 21, 1 << 22, 1 << 12]
    wire = WireRates()

    def step(per_byte, latency):
        wire.saw([(CommCost(2, size), 2 * latency + per_byte * size) for size in sizes])

    for _ in range(SPAN):
        assert not wire.known
        step(GIGABIT, 1e-4)
    assert wire.known
    assert wire.per_byte == pytest.approx(GIGABIT, rel=0.02)
    assert wire.latency == pytest.approx(1e-4, rel=0.1)
    step(100 * GIGABIT, 1e-1)
    assert wire.per_byte == pytest.approx(GIGABIT, rel=0.02), "one step that swings says nothing"
    for _ in range(SPAN):
        step(20 * GIGABIT, 1e-4)
    assert wire.per_byte == pytest.approx(20 * GIGABIT, rel=0.02)
    wire.saw([(CommCost(0, 0), 1.0), (CommCost(2, LARGE_BYTES), 0.0)])
    assert wire.per_byte == pytest.approx(20 * GIGABIT, rel=0.02), "what was not measured says nothing"


class Told(Exchange):
    """An exchange whose link and machine are as fast as it is told: their times are put into the vote."""

    per_byte, per_flop = SLOW, 0.0

    def collect(self, vote):
        vote = super().collect(vote)
        costs = self.choice.costs(self._flight.groups, self.choice.most)
        vote.took = tuple(1e-4 * cost.steps + self.per_byte * cost.bytes for cost in costs)
        vote.multiply = self.per_flop
        return vote


def test_forms_hold_soon_after_the_link_changes_and_the_training_stays_exact():
    """A machine for which 128 x 128 of 12 rows are 20 ms to rebuild: dense on a fast link, factors on a slow one."""
    per_flop = 20e-3 / (2 * 12 * HIDDEN * HIDDEN)
    batches = [rows(24, seed) for seed in range(60)]
    model = build()

    def work(link):
        exchange = Told()
        exchange.per_flop = per_flop
        rank, seen = Rank(link, model, exchange=exchange), []
        for number, data in enumerate(batches):
            exchange.per_byte = {0: 1e-5, 1: 1e-9, 2: 1e-5}[number // 20]
            rank.train([data])
            seen.append(tuple(exchange.forms()))
        why, state = exchange.explain(), rank.state()
        exchange.close()
        return seen, why, state

    results = ranks.run(2, work)
    seen, why, _ = results[0]
    assert all(each[0] == seen for each in results)
    assert seen[0].count(FACTORS) == 2
    assert all(set(forms) == {DENSE} for forms in seen[30:40])
    assert all(forms.count(FACTORS) == 2 for forms in seen[50:])
    changes = sum(one != other for one, other in itertools.pairwise(seen))
    assert changes == 2, "forms do not swing"
    assert any(line.startswith("second.weight: factors; factors 0.02 MB in") for line in why)
    want, _ = reference(model, batches)
    for _, _, state in results:
        assert gap(state, want) < 1e-9
    assert MIN_STEPS_IN_A_ROW + SPAN < 10


class Late(Handle):
    """A message that takes so long, after the one before it."""

    def __init__(self, handle, seconds):
        self.handle, self.seconds = handle, seconds

    def done(self):
        return False

    def wait(self, deadline_s=None):
        result = self.handle.wait(deadline_s)
        time.sleep(self.seconds)
        return result


class Slow(memory.Link):
    """A link of so many seconds per byte, on the lane of gradients."""

    per_byte = 2e-7

    def lane(self, name):
        return Slow(self.hub, self.rank, self.generation, f"{self.name}/{name}")

    def sum(self, tensor, what="sum"):
        return Late(super().sum(tensor, what), self.per_byte * summed(tensor.nbytes, self.size).bytes)

    def all_gather(self, tensor, what="all-gather", even=False):
        handle = super().all_gather(tensor, what, even)
        if "factors" not in what:
            return handle
        return Late(handle, self.per_byte * gathered(tensor.nbytes, self.size).bytes)


def test_a_slow_link_is_measured_to_be_no_faster_than_it_is():
    """One bound alone: a busy machine makes it slower still."""
    hub = memory.Hub(2)

    def work(link: Link):
        rank = Rank(link, build())
        rank.train([rows(24, seed) for seed in range(SPAN + 1)])
        rates = rank.exchange.choice.rates
        rank.exchange.close()
        return rates

    one, other = ranks.run(2, work, [Slow(hub, 0), Slow(hub, 1)])
    assert one == other, "everyone decides from the same numbers"
    assert one.per_byte >= 0.9 * Slow.per_byte
    assert one.per_flop > 0


def test_multiplication_is_timed_on_a_part_of_the_layer():
    start = time.perf_counter()
    assert 0 < multiplication(LAYER, 64, torch.float32, torch.device("cpu")) < 1e-7
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize("seed", range(20))
def test_the_wire_never_waits_while_a_piece_is_ready_and_what_is_read_first_goes_first(seed):
    dice = torch.Generator().manual_seed(seed)
    ready = torch.rand(9, generator=dice).sort().values.tolist()
    seconds = (torch.rand(9, generator=dice) * 0.3).tolist()
    turns = send_order.at_once(ready, seconds)
    assert sorted(turns) == list(range(9))
    now = 0.0
    for place, turn in enumerate(turns):
        left = turns[place:]
        begin = max(now, ready[turn])
        assert begin == max(now, min(ready[i] for i in left)), "the wire waited for a piece that was not the next"
        assert turn == max(i for i in left if ready[i] <= begin)
        now = begin + seconds[turn]
    as_they_come = 0.0
    for i in range(9):
        as_they_come = max(as_they_come, ready[i]) + seconds[i]
    assert now == pytest.approx(as_they_come), "order moves no bytes"


@pytest.mark.parametrize("seed", range(20))
def test_moved_by_need_forward_ends_no_later_and_nearly_as_soon_as_by_any_order(seed):
    dice = torch.Generator().manual_seed(seed)
    backward = (0.01 + 0.3 * torch.rand(6, generator=dice)).tolist()
    ready = list(itertools.accumulate(backward))
    seconds = (torch.rand(6, generator=dice) * 0.5).tolist()
    turns = send_order.by_need(ready, seconds)
    assert sorted(turns) == list(range(6))
    end = send_order.forward_ends(turns, ready, seconds)
    assert end <= send_order.forward_ends(send_order.at_once(ready, seconds), ready, seconds)
    best = min(send_order.forward_ends(each, ready, seconds) for each in itertools.permutations(range(6)))
    assert end <= 1.05 * best


def test_when_forward_ends_as_drawn_by_hand():
    """
    backward   0 1 . 2 |     three pieces, ready after 1, 2 and 4 s; each 2 s on the wire, in the order 0, 2, 1
    wire       . 0 0 . 2 2 1 1          from 1 to 3, 4 to 6, 6 to 8
    forward    . . . . . . 2 . 1 0      reads 2 at 6, for 1 s; 1 at 8, for half one; 0 has long been there
    """
    assert send_order.forward_ends([0, 2, 1], [1.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == 8.5
    assert send_order.forward_ends([0, 1, 2], [1.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == 8.5
    assert send_order.forward_ends([0, 2, 1], [1.0, 2.0, 4.0], [0.0, 0.0, 0.0]) == 5.5


def test_small_neighbours_go_together_where_messages_are_dear():
    ready, seconds, sizes, kinds = [0.0, 0.001, 0.002, 5.0], [1e-3] * 4, [1 << 16] * 4, ["fp32"] * 4
    assert send_order.merged(range(4), ready, seconds, sizes, kinds, 0.02) == ((0, 1, 2), (3,))
    assert send_order.merged(range(4), ready, seconds, sizes, kinds, 0.0) == ((0,), (1,), (2,), (3,))
    assert send_order.merged(range(4), ready, seconds, sizes, ["fp32", "", "fp32", "fp32"], 0.02) == (
        (0,),
        (1,),
        (2,),
        (3,),
    )
    assert send_order.merged(range(4), ready, seconds, [1 << 24] * 4, kinds, 1.0) == ((0,), (1,), (2,), (3,))
    # also where all have long been ready when the wire is free: nothing is saved
    assert send_order.merged(range(4), ready, [9.0] * 4, sizes, kinds, 0.0) == ((0,), (1,), (2,), (3,))
    assert send_order.merged(range(4), ready, [9.0] * 4, sizes, kinds, 0.02) == ((0, 1, 2), (3,))
    assert send_order.merged(range(4), ready, [9.0] * 4, sizes, kinds, 0.02, True) == ((0,), (1,), (2,), (3,))


def test_a_ballot_keeps_what_was_measured():
    vote = Vote(rows=(3, 4), ready=(0.0, 0.5), took=(0.25, 0.125), multiply=1e-10, terms=(1.5,), paces=((1.0, 2.0),))
    back = Vote.unpack(vote.pack())
    assert back == vote
    other = Vote(rows=(1, 1), ready=(0.5, 0.0), took=(0.5, 0.0625), multiply=1e-11)
    merged = Vote.merge([vote, other])
    assert (merged.ready, merged.took, merged.multiply) == ((0.5, 0.5), (0.25, 0.0625), 1e-10)


def test_forms_may_be_asked_for():
    with pytest.raises(ValueError, match="forms is one of measured, bytes, dense, factors, got 'dens'"):
        Exchange("dens")
    for asked, count in (("dense", 0), ("factors", 2), ("bytes", 2)):

        def work(link, asked=asked):
            rank = Rank(link, build(), exchange=f"allreduce:forms={asked}")
            rank.train([rows(24, 1)])
            forms = list(rank.exchange.forms())
            rank.exchange.close()
            return forms.count(FACTORS)

        assert ranks.run(2, work) == [count, count]
