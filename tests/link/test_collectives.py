"""Every algorithm gives the closed form and the same bits everywhere, and costs what it says."""

from __future__ import annotations

import math
import threading
from collections import Counter

import pytest
import torch

import ranks
from paceline import transport
from paceline.link.collectives import double_tree
from paceline.link.net.collective_rounds import Message, packed
from paceline.link.net.collective_run import Collective, Traffic, names, seconds
from paceline.testing.links import LIMIT_S, everyone, pattern, same
from partly import partly

pytestmark = pytest.mark.long

ALGORITHMS = names()
SIZES = range(1, 10)
WHOLE = 2520  # divisible by 1 .. 9
LONG = 2 * 3 * double_tree.SEGMENT + 5  # three segments in each half of the double tree, unequal ones


def counts(size):
    return sorted({0, 1, 2, 7, size - 1, size + 1, 1001})


def placed(size):
    """Ranks on nodes of unequal size, not side by side."""
    return [(rank * rank) % 3 for rank in range(size)]


def sums(size, work):
    """work(link, name, count) on every rank, for every algorithm and length, each on a lane of its own."""

    def one(link):
        for name in ALGORITHMS:
            for count in counts(size):
                work(link.lane(f"{name}/{count}"), name, count)

    ranks.run(size, one)


class Meter:
    """What really goes over the links of one world: messages, bytes of each rank, and when each begins."""

    def __init__(self):
        self.changed = threading.Condition()
        self.sent, self.messages, self.ticks = Counter(), 0, 0
        self.begins = {}


class Metered(partly(transport.Link)):
    """A link whose messages are counted, and timed by a clock of its own: a message is one tick of both its ends."""

    def __init__(self, link, meter):
        self.link, self.meter = link, meter
        self.rank, self.size, self.hosts = link.rank, link.size, link.hosts
        self.posted, self.flying, self.clock, self.end = Counter(), 0, 0, 0

    def send(self, tensor, peer, tag=0):
        with self.meter.changed:
            self.meter.messages += 1
            self.meter.sent[self.rank] += tensor.nbytes
        return self._post(self.link.send(tensor, peer, tag), (self.rank, peer))

    def recv(self, tensor, peer, tag=0):
        return self._post(self.link.recv(tensor, peer, tag), (peer, self.rank))

    def _post(self, handle, ends):
        if not self.flying:
            self.clock = self.end
        self.flying += 1
        self.posted[ends] += 1
        key = (*ends, self.posted[ends])
        with self.meter.changed:
            self.meter.begins.setdefault(key, []).append(self.clock)
            self.meter.changed.notify_all()
        return Timed(self, handle, key)


class Timed(transport.Handle):
    def __init__(self, link, handle, key):
        self.link, self.handle, self.key = link, handle, key

    def wait(self, deadline_s=None):
        link, meter = self.link, self.link.meter
        result = self.handle.wait(deadline_s)
        with meter.changed:
            assert meter.changed.wait_for(lambda: len(meter.begins.get(self.key, ())) == 2, LIMIT_S), self.key
            link.end = max(link.end, *(begin + 1 for begin in meter.begins[self.key]))
            meter.ticks = max(meter.ticks, link.end)
        link.flying -= 1
        return result


@pytest.mark.parametrize("size", SIZES)
def test_the_sum_is_the_closed_form_and_its_cost_is_what_was_counted(size):
    meters = {(name, count): Meter() for name in ALGORITHMS for count in counts(size)}
    where = placed(size)

    def work(link, name, count):
        mine = ((link.rank + 1) * pattern(count)).float()
        result = Collective(name).run(Metered(link, meters[name, count]), mine, where, deadline_s=LIMIT_S)
        assert result is mine
        same(mine, everyone(link) * pattern(count), name, count)

    sums(size, work)
    for (name, count), meter in meters.items():
        cost = Collective(name).cost(size, 4 * count, 4, where)
        what = name, size, count
        assert cost.messages == meter.messages, what
        assert cost.total_bytes == meter.sent.total() == 2 * (size - 1) * 4 * count, what
        assert cost.bytes == max(meter.sent.values(), default=0), what
        assert cost.steps == meter.ticks, what


@pytest.mark.parametrize("size", [4, 5])
def test_a_long_tensor_goes_through_the_double_tree_in_segments(size):
    meter = Meter()

    def work(link):
        mine = (link.rank + 1) * pattern(LONG).float()
        same(Collective("double_tree").run(Metered(link, meter), mine), everyone(link) * pattern(LONG))

    ranks.run(size, work)
    cost = Collective("double_tree").cost(size, 4 * LONG)
    assert cost.messages == meter.messages == 2 * 2 * 3 * (size - 1)
    assert cost.bytes == max(meter.sent.values())
    assert cost.steps == meter.ticks
    assert cost.serial_bytes < Collective("binomial").cost(size, 4 * LONG).serial_bytes


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_end_with_the_same_bits(size):
    got = {}

    def work(link, name, count):
        mine = torch.randn(count, generator=torch.Generator().manual_seed(link.rank)) * 10.0**link.rank
        got[name, count, link.rank] = Collective(name).run(link, mine, placed(size))

    sums(size, work)
    for (name, count, rank), bits in got.items():
        assert torch.equal(bits, got[name, count, 0]), (name, count, rank)


def test_the_order_of_additions_is_the_one_stated():
    a, b, c, d = x = [torch.randn(8, generator=torch.Generator().manual_seed(r)) * 7.0**r for r in range(4)]

    def joined(parts, of):
        """Slice by slice: what `of` says of slice i."""
        return torch.cat([of(i).chunk(parts)[i] for i in range(parts)])

    halved = joined(4, lambda i: (x[i] + x[i ^ 2]) + (x[i ^ 1] + x[i ^ 3]))
    stated = {
        "ring": joined(4, lambda i: ((x[i] + x[(i + 1) % 4]) + x[(i + 2) % 4]) + x[(i + 3) % 4]),
        "binomial": (a + b) + (c + d),
        "double_tree": joined(2, lambda i: d + ((b + c) + a) if i else a + ((c + b) + d)),
        "halving": halved,
        "blocks": halved,
        "two_level": (a + b) + (c + d),
    }
    assert set(stated) == set(ALGORITHMS)
    assert len({tuple(bits.tolist()) for bits in stated.values()}) == 4, "the inputs tell the orders apart"
    for name, want in stated.items():
        got = ranks.run(4, lambda link, name=name: Collective(name).run(link, x[link.rank].clone(), [0, 0, 1, 1]))
        assert torch.equal(got[0], want), name


@pytest.mark.parametrize("size", SIZES)
def test_costs_are_those_of_the_books(size):
    """Divisible lengths: the equations as published, of n elements of one byte."""
    n, power = WHOLE * 8, 1 << int(math.log2(size))
    costs = {name: Collective(name).cost(size, n, 1) for name in ALGORITHMS}
    log, share = math.ceil(math.log2(size)), 2 * (size - 1) * n // size
    ring, halving, tree = costs["ring"], costs["halving"], costs["binomial"]
    assert ring == Traffic(2 * (size - 1), share, share // 2, share, 2 * (size - 1) * n, 2 * (size - 1) * size)
    assert (tree.steps, tree.bytes, tree.serial_bytes) == (2 * log, log * n, 2 * log * n)
    assert costs["double_tree"].bytes <= 2 * n
    assert costs["double_tree"].steps <= 4 * math.log2(size)
    assert costs["two_level"] == ring, "every rank is a node of its own"
    if size == power:
        assert halving == Traffic(2 * log, share, share // 2, share, 2 * (size - 1) * n, 2 * log * size)
        assert costs["blocks"] == halving
    else:
        inside = 2 * (power - 1) * n // power
        assert halving.steps == 2 * int(math.log2(power)) + 2
        assert halving.serial_bytes == inside + 2 * n
        assert costs["blocks"].bytes < halving.bytes, "what blocks are for"
    assert seconds(ring, 1e-3, 1e-6) == pytest.approx(ring.steps * 1e-3 + share * 1e-6)


def test_two_levels_send_the_share_of_a_node_and_no_more():
    where = [0, 0, 0, 1, 1, 2, 2, 2]
    leaving = Counter()
    for one in Collective("two_level").rounds(8, WHOLE, where):
        for message in one:
            if where[message.source] != where[message.target]:
                leaving[where[message.source]] += message.length
    assert leaving == dict.fromkeys((0, 1, 2), 2 * (3 - 1) * WHOLE // 3)


@pytest.mark.parametrize("size", range(2, 34))
def test_double_trees_span_all_ranks_and_inner_ones_of_one_are_leaves_of_the_other(size):
    inner = []
    for tree in double_tree.trees(range(size)):
        assert sorted(tree) == list(range(size))
        parents = {tree[node]: tree[double_tree.parent(node, size)] for node in range(1, size)}
        for rank in parents:
            path = [rank]
            while path[-1] != tree[0]:
                path.append(parents[path[-1]])
            assert len(path) <= math.ceil(math.log2(size)) + 1
        assert max(Counter(parents.values()).values()) <= 2
        inner.append(set(parents.values()))
    assert inner[0] & inner[1] <= (set() if size % 2 == 0 else {0})


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_sends_one_and_receives_one_at_a_time_and_never_the_same_elements(name, size):
    for count in (*counts(size), 4 * double_tree.SEGMENT):
        for one in Collective(name).rounds(size, count, placed(size)):
            assert one, "an empty round"
            sources, targets = {m.source: m for m in one}, {m.target: m for m in one}
            assert len(sources) == len(targets) == len(one)
            for rank in sources.keys() & targets.keys():
                out, into = sources[rank], targets[rank]
                assert out.stop <= into.start or into.stop <= out.start
            assert all(m.start < m.stop and m.source != m.target for m in one)


def test_the_picture_of_a_ring_and_of_blocks():
    """from>to[elements], + added, = taken; one line a round."""

    def picture(name):
        return [
            " ".join(f"{m.source}>{m.target}[{m.start}:{m.stop}]{'+' if m.add else '='}" for m in one)
            for one in Collective(name).rounds(3, 4)
        ]

    assert picture("ring") == [
        "0>1[0:1]+ 1>2[1:2]+ 2>0[2:4]+",
        "0>1[2:4]+ 1>2[0:1]+ 2>0[1:2]+",
        "1>0[2:4]= 2>1[0:1]= 0>2[1:2]=",
        "1>0[0:1]= 2>1[1:2]= 0>2[2:4]=",
    ]
    assert picture("blocks") == [
        "0>1[2:4]+ 1>0[0:2]+",
        "2>0[0:2]+",
        "2>1[2:4]+",
        "1>2[2:4]=",
        "0>2[0:2]=",
        "1>0[2:4]= 0>1[0:2]=",
    ]


def test_a_message_waits_for_what_it_carries_and_for_no_more():
    chain = [Message(0, 1, 0, 4), Message(1, 2, 0, 2), Message(1, 2, 4, 6), Message(3, 4, 0, 0)]
    assert packed(chain) == ((chain[0], chain[2]), (chain[1],))


def test_other_shapes_and_types_are_added_in_place():
    def work(link):
        for name in ALGORITHMS:
            for dtype in (torch.bfloat16, torch.float64, torch.int64):
                whole = ((link.rank + 1) * pattern(24)).view(4, 6).to(dtype)
                column, before = whole[:, 1:3], whole.clone()
                assert Collective(name).run(link, column) is column
                same(column, everyone(link) * pattern(24).view(4, 6)[:, 1:3], name, dtype)
                same(whole[:, 3:], before[:, 3:], name, dtype)
            weight = torch.nn.Parameter(torch.tensor(link.rank + 1.0))
            same(Collective(name).run(link, weight).detach(), torch.tensor(float(everyone(link))))

    ranks.run(3, work)


def test_mistakes_are_told():
    with pytest.raises(
        ValueError, match=r"no collective named 'rings'; known: binomial, blocks, .* did you mean 'ring'"
    ):
        Collective("rings")
    with pytest.raises(ValueError, match="the node of each of 3 ranks, got 2"):
        Collective("two_level").cost(3, 8, nodes=[0, 1])
    with pytest.raises(ValueError, match="6 bytes are no whole number of elements of 4 bytes"):
        Collective("ring").cost(3, 6)
