"""What N nodes are predicted to take: bounds, closed forms in the extremes, a schedule by hand, and a real wire."""

from __future__ import annotations

import io
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from torch.nn import functional as F

import launching
import ranks
from cluster import Cluster
from machines import needs_cluster, needs_tun
from nodes import OPTIMIZERS, build, rows
from paceline.codec.encoding import packing
from paceline.engine import sequential
from paceline.engine.compute.timeline import record
from paceline.exchange.flow.costs import SAVES, SAVES_S, SLOW_S, ring
from paceline.link import memory
from paceline.link.net.collective_run import Collective, names
from paceline.messages import DENSE, FACTORS, SUM, ExchangeTraffic
from paceline.planner.cluster import collectives_by
from paceline.planner.cluster_model import VOTE_BYTES, NetworkModel, predict
from paceline.planner.measure import network as measuring
from paceline.planner.measure.network import NetworkMeasurement, Pair, measure, pair_rounds, slope
from paceline.planner.plan_file import Between, Plan
from paceline.planner.plan_tables import pair_table
from paceline.planner.step_model import LayerTiming, StepModel
from paceline_bench.cluster.namespaces import bits_per_s
from waiting import VirtualTime

HERE = Path(__file__).parents[1] / "support"
FAST = NetworkModel(0.0, float("inf"))


def line(*parts: LayerTiming, forward_s=1.0, update_s=0.5, factored_s=0.2, order=None, **more) -> StepModel:
    order = order or tuple(range(len(parts)))
    more = {"rows": 8.0, "item_bytes": 4, **more}
    return StepModel(
        forward_s=forward_s,
        parts=parts,
        order={DENSE: order, FACTORS: order},
        update_s=update_s,
        factored_s=factored_s,
        **more,
    )


def some_line(dice: random.Random) -> StepModel:
    parts = []
    for i in range(dice.randint(1, 6)):
        wide = dice.choice([0, 0, 100, 1000])
        numel, sides = (wide * wide, 2 * wide) if wide else (dice.randint(1, 1 << 20), 0)
        seconds = [dice.uniform(0, 0.05) for _ in range(3)]
        parts.append(LayerTiming(f"part {i}", numel, sides, 8.0 * bool(wide), *seconds))
    order = list(range(len(parts)))
    dice.shuffle(order)
    return line(*parts, forward_s=dice.uniform(0, 0.4), update_s=0.02, factored_s=0.01, order=tuple(order))


def cases(count=200):
    dice = random.Random(7)
    for _ in range(count):
        one = some_line(dice)
        nodes = dice.randint(2, 9)
        lines = [one.scaled(dice.uniform(0.5, 2.0)) for _ in range(nodes)]
        yield lines, NetworkModel(dice.uniform(0, 1e-3), 10 ** dice.uniform(6, 10), dice.uniform(0, 1e-9), 1e-10)


def test_one_node_is_its_own_line():
    for lines, wire in cases(20):
        for absorbs in (False, True):
            alone = replace(lines[0], absorbs=absorbs)
            seen = predict([alone], wire)
            assert seen.step_s == pytest.approx(alone.alone_s())
            assert (seen.sent_bytes, seen.exposed_s, seen.wire_s) == (0, 0, 0)


def test_a_step_is_never_shorter_than_its_compute_nor_than_its_wire():
    for lines, wire in cases():
        seen = predict(lines, wire)
        slowest_s = max(max(one.ready(seen.forms)) + one.updating_s(seen.forms) for one in lines)
        assert seen.step_s >= slowest_s * (1 - 1e-9)
        assert seen.step_s >= (seen.wire_s + seen.update_s) * (1 - 1e-9)
        assert seen.exposed_s <= seen.wire_s * (1 + 1e-9)
        assert seen.step_s == pytest.approx(seen.compute_s + seen.exposed_s + seen.update_s)


def test_a_better_wire_is_never_slower():
    for lines, wire in cases():
        seen = predict(lines, wire)
        for better in (
            replace(wire, bytes_per_s=wire.bytes_per_s * 2),
            replace(wire, latency_s=wire.latency_s / 2),
            replace(wire, adding_s=0.0),
            replace(wire, cpu_s=0.0),
        ):
            assert predict(lines, better, seen.forms).step_s <= seen.step_s + 1e-12


def test_over_an_endlessly_fast_wire_nodes_compute_and_update():
    for lines, _ in cases(50):
        seen = predict(lines, FAST)
        compute_s = max(max(one.ready(seen.forms)) for one in lines)
        update_s = max(one.updating_s(seen.forms, len(lines) - 1) for one in lines)
        assert seen.step_s == pytest.approx(compute_s + update_s)
        assert seen.exposed_s == 0


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_without_compute_a_step_is_the_wire_in_closed_form(nodes):
    wire = NetworkModel(1e-3, 1e6)
    dense, thin = LayerTiming("dense", 1000), LayerTiming("thin", 90_000, 600, 5.0)
    idle = line(dense, thin, forward_s=0.0, update_s=0.0, factored_s=0.0, rows=5.0)
    seen = predict([idle] * nodes, wire, [DENSE, FACTORS])
    num_bytes = 2 * (nodes - 1) / nodes * 4000 + (nodes - 1) * 5 * 600 * 4 + (nodes - 1) * VOTE_BYTES
    messages = 2 * (nodes - 1) + 2 * (nodes - 1) + (nodes - 1)
    assert seen.sent_bytes == pytest.approx(num_bytes)
    assert seen.step_s == pytest.approx(messages * 1e-3 + num_bytes / 1e6)


def test_after_a_pause_of_computing_the_first_bytes_wait_for_their_acknowledgements():
    """Story: links of 20 ms took a quarter longer than foretold. Seven windows, of 10 packets and of twice as many each
    time, are less than the megabyte that is under way in a round trip of 40 ms."""
    wire, megabytes = NetworkModel(0.02, 25e6), LayerTiming("dense", 1_000_000)
    waits = [7 * 0.04 - (2**7 - 1) * 14_480 / 25e6, 0.0]
    for forward_s, waits_s in zip((1.0, 0.1), waits, strict=True):
        seen = predict([line(megabytes, forward_s=forward_s)] * 2, wire, [DENSE])
        at_once_s = 2 * 0.02 + 4e6 / 25e6 + 0.02 + VOTE_BYTES / 25e6
        assert seen.exposed_s == pytest.approx(at_once_s + waits_s)
        assert seen.wire_s == pytest.approx(seen.exposed_s)
    assert wire.slow_start_s(14_480) == NetworkModel(1e-5, 25e6).slow_start_s(4e6) == FAST.slow_start_s(4e6) == 0.0


def test_it_is_said_of_every_fully_connected_layer_how_it_travels_and_why():
    for lines, wire in cases():
        seen = predict(lines, wire)
        layers = sorted((part.numel for part in lines[0].parts if part.sides), reverse=True)
        assert len(seen.why) == len(layers)
        forms = {part.name: form for part, form in zip(lines[0].parts, seen.forms, strict=True)}
        sizes = {part.name: part.numel for part in lines[0].parts}
        told = [re.match(r"(part \d+) (factors|dense): (.*)", words).groups() for words in seen.why]
        assert [sizes[name] for name, _, _ in told] == layers
        for name, form, why in told:
            assert form == forms[name]
            if "no smaller" not in why:
                factors_s, dense_s = (float(number) for number in re.findall(r"([\d.]+) ms", why))
                assert (form == FACTORS) == (factors_s < dense_s) or abs(factors_s - dense_s) <= max(
                    1e3 * SAVES_S, SAVES * max(factors_s, dense_s)
                ) + 0.1  # as printed


def test_the_schedule_drawn_by_hand():
    """
    backward   a a b . . . .        forward 1 s; a is ready at 3 s, b at 4 s
    wire       . . A A A B B B      each 3 s on the wire: A from 3 to 6, B from 6 to 9
    """
    two = line(LayerTiming("a", 300, dense_s=2.0), LayerTiming("b", 300, dense_s=1.0))
    seen = predict([two, two], NetworkModel(0.0, 400.0), [DENSE, DENSE])
    vote_s = VOTE_BYTES / 400.0
    assert seen.compute_s == 4.0
    assert seen.exposed_s == pytest.approx(9.0 - 4.0 + vote_s)
    assert seen.step_s == pytest.approx(9.0 + vote_s + 0.5)


@pytest.mark.parametrize(("nodes", "dense_left"), [(2, 0.8), (3, 1.0)])
def test_on_a_slow_wire_alone_fewer_bytes_are_predicted(nodes, dense_left):
    """Of factors always, of sums between two nodes: among three a gather would be more."""
    plain = LayerTiming("dense", 100_000), LayerTiming("thin", 900_000, 600, 5.0)
    parts = (
        replace(plain[0], packed_dense=0.8, packed_factors=0.1),
        replace(plain[1], packed_factors=0.5, packed_dense=0.1),
    )
    forms, vote_bytes = [DENSE, FACTORS], (nodes - 1) * VOTE_BYTES
    for rate, left in ((2 / SLOW_S, (1.0, 1.0)), (0.5 / SLOW_S, (dense_left, 0.5))):
        before, seen = (
            predict([line(*each, rows=5.0)] * nodes, NetworkModel(1e-4, rate), forms) for each in (plain, parts)
        )
        dense_bytes, factor_bytes = 2 * (nodes - 1) / nodes * 400_000, (nodes - 1) * 5 * 600 * 4
        assert before.sent_bytes == pytest.approx(dense_bytes + factor_bytes + vote_bytes)
        assert seen.sent_bytes == pytest.approx(left[0] * dense_bytes + left[1] * factor_bytes + vote_bytes)


def test_a_part_waits_for_the_slowest_node_and_for_those_before_it():
    one = line(LayerTiming("a", 300, dense_s=1.0), LayerTiming("b", 300, dense_s=1.0), order=(1, 0))
    late = one.scaled(2.0)
    seen = predict([one, late], NetworkModel(0.0, 400.0), [DENSE, DENSE])
    # a, the first to leave, is ready last: at 6 s on the slower node
    assert seen.step_s == pytest.approx(6.0 + 3.0 + 3.0 + VOTE_BYTES / 400.0 + 1.0)


def test_a_layer_goes_as_factors_where_that_is_sooner_and_they_fit():
    wide = LayerTiming("wide", 1_000_000, 2000, 8.0, product_s=1e-4)

    def form(part, wire, nodes=2):
        return predict([line(part)] * nodes, wire).forms[0]

    slow, fast = NetworkModel(1e-4, 1e7), NetworkModel(1e-4, 1e11)
    assert form(wide, slow) == FACTORS
    assert form(wide, fast) == FACTORS, "fewer bytes, where time tells nothing"
    assert form(replace(wide, product_s=0.01), fast) == DENSE, "rebuilding costs more than it saves"
    assert form(wide, slow, nodes=63) == DENSE, "63 nodes' rows are more than the gradient"
    assert form(replace(wide, rows=0.0), slow) == DENSE
    assert form(replace(wide, sides=0), slow) == DENSE
    assert form(replace(wide, product_s=10.0), slow) == DENSE


def test_a_line_between_two_recordings():
    part = LayerTiming("part", 100, 20, 16.0, 4.0, 2.0, 1.0)
    many = line(part, forward_s=4.0, rows=16.0)
    few = line(replace(part, rows=4.0, dense_s=1.6, factors_s=0.8, product_s=0.4), forward_s=2.5, rows=4.0)
    assert many.at(16, few) == many
    assert many.at(4, few).forward_s == pytest.approx(2.5)
    middle = many.at(10, few)
    assert (middle.rows, middle.parts[0].rows) == (10, 10)
    assert middle.forward_s == pytest.approx(3.25)
    assert middle.parts[0].dense_s == pytest.approx(2.8)
    assert many.at(2, few).forward_s == pytest.approx(2.25)
    assert many.at(8).forward_s == pytest.approx(2.0), "in proportion, where there is one recording alone"
    tilted = replace(few, forward_s=0.1)  # less than its rows' part of what many take
    assert many.at(1, tilted).forward_s == pytest.approx(0.1 / 4)


def test_a_line_is_what_its_timeline_says():
    model, engine = build(), sequential.Engine()
    engine.open(model, OPTIMIZERS["momentum"](model.parameters()), F.cross_entropy)
    timeline = record(engine, model, rows(6, 1), passes=3)
    engine.close()
    assert timeline.factored_update > 0
    made = StepModel.of(json.loads(timeline.to_json()), absorbs=True)
    large = [part for part in made.parts if part.numel * 8 >= packing.MIN_BYTES]
    assert large
    assert all(0.2 < part.packed_dense < 1 for part in large)
    assert all(part.packed_dense == 1 for part in made.parts if part not in large)
    assert StepModel.read(json.loads(json.dumps(vars(made), default=vars))) == made
    forms = [DENSE] * len(made.parts)
    assert max(made.ready(forms)) + made.updating_s(forms) == pytest.approx(timeline.total(forms))
    factored = {
        s.index: n for s, n in zip(timeline.buckets, timeline.factor_rows, strict=True) if s.linear and s.fits(n)
    }
    assert len(factored) > 1
    one = dict([min(factored.items())])
    for some in (factored, one):
        forms = [FACTORS if s.index in some else DENSE for s in timeline.buckets]
        assert made.updating_s(forms) == pytest.approx(timeline.updating(some))
        thrice = {index: 3 * rows for index, rows in some.items()}
        assert made.updating_s(forms, 2.0) == pytest.approx(timeline.updating(thrice))
    assert [part.sides > 0 for part in made.parts] == [bucket.linear for bucket in timeline.buckets]
    assert made.scaled(2.0).alone_s() == pytest.approx(2 * made.alone_s())
    with pytest.raises(ValueError, match="not a timeline's JSON"):
        StepModel.of({"rows": 1})


BIG = LayerTiming("head", 1_000_000, 2_000, 8.0, dense_s=0.1, factors_s=0.05, product_s=0.001)


@pytest.mark.parametrize(
    ("ways", "sent_bytes", "form"),
    [
        (ExchangeTraffic(), 3 * 8 * 2000 * 4, FACTORS),
        (ExchangeTraffic(factor_bytes=2), 3 * 8 * 2000 * 2, FACTORS),  # computed in 16 bits everywhere
        (ExchangeTraffic(factors=False), 2 * 3 / 4 * 4e6, DENSE),
        (ExchangeTraffic(factors=False, dense_bytes=2), 2 * 3 / 4 * 2e6, DENSE),  # codec half
        (ExchangeTraffic(factors=False, dense_bytes=0.03), 2 * 3 / 4 * 0.03e6, DENSE),  # feedback/lowrank
        (ExchangeTraffic(factors=False, copy_bytes=4), 7 / 4 * 4e6, DENSE),  # exchange server
        (ExchangeTraffic(factors=False, dense_bytes=0.08, gathers=True), 3 * 0.08e6, DENSE),  # feedback/topk
        (
            ExchangeTraffic(dense_bytes=0.01, gathers=True, loses=True),
            3 * 8 * 2000 * 4,
            FACTORS,
        ),  # topk, of fewer bytes yet
        (ExchangeTraffic(factors=False, gathers=True), 3 * 4e6, DENSE),  # exchange tree
        (ExchangeTraffic(factors=False, every=8), 2 * 3 / 4 * 4e6 / 8, DENSE),  # periodic:8
    ],
)
def test_what_is_sent_is_what_the_exchange_and_its_codec_send(ways, sent_bytes, form):
    """Story: every job was foretold as one of allreduce without a codec."""
    wire = NetworkModel(0.0, 1e7)
    seen = predict([line(BIG, ways=ways)] * 4, wire)
    votes = 3 * VOTE_BYTES / (ways.every or 1)
    assert seen.sent_bytes == pytest.approx(sent_bytes + votes)
    assert seen.forms == (form,)
    if ways.every:
        assert seen.exposed_s == pytest.approx((sent_bytes + votes) / 1e7), "while nobody computes"
    assert StepModel.read(json.loads(json.dumps(vars(line(BIG, ways=ways)), default=vars))).ways == ways


def test_what_comes_during_the_next_forward_pass_is_not_waited_for():
    wire, late = NetworkModel(0.0, 1e7), ExchangeTraffic(factors=False, forward=True)
    exposed = [predict([line(BIG, ways=ways)] * 2, wire).exposed_s for ways in (ExchangeTraffic(factors=False), late)]
    assert exposed[0] == pytest.approx(0.4, rel=0.01)
    assert exposed[1] == pytest.approx(VOTE_BYTES / 1e7), "forward takes a second"


def test_what_batch_norm_adds_up_over_all_nodes_is_waited_for():
    """Story: batch_norm="sync" was in no prediction."""
    wire, plain = NetworkModel(1e-3, 1e6), ExchangeTraffic(factors=False)
    synced = replace(plain, norm_sums=8, norm_numel=1000)
    for nodes in (2, 4):
        before, seen = (predict([line(BIG, ways=ways)] * nodes, wire) for ways in (plain, synced))
        norm_s = 8 * 2 * (nodes - 1) * 1e-3 + 2 * (nodes - 1) / nodes * 8000 / 1e6
        assert seen.exposed_s - before.exposed_s == pytest.approx(norm_s)
        assert seen.step_s - before.step_s == pytest.approx(norm_s)
    assert predict([line(BIG, ways=synced)], wire) == predict([line(BIG, ways=plain)], wire)


def test_a_layer_whose_factors_are_not_its_whole_gradient_is_foretold_dense():
    """Story: one with a penalty in the loss was foretold as factors, which it never travelled as."""
    model, engine = build(), sequential.Engine()

    def loss(output, target):
        return F.cross_entropy(output, target) + model.first.weight.square().sum()

    engine.open(model, OPTIMIZERS["momentum"](model.parameters()), loss)
    model.second.weight.register_hook(lambda grad: grad)
    made = StepModel.of(json.loads(record(engine, model, rows(6, 1), passes=1).to_json()), absorbs=True)
    engine.close()
    names = [part.name for part in made.parts]
    for forms in (predict([made] * 2, NetworkModel(1e-4, 1e6)).forms, made.alone()):
        told = dict(zip(names, forms, strict=True))
        assert (told["first.weight"], told["second.weight"]) == (DENSE, DENSE)


STEPS, LAYER_S = 8, 0.02


def write_timeline(path: Path) -> StepModel:
    """Four layers of 20 ms; three of 4 MB each, and one that may travel as factors."""
    shapes = [((1 << 20,), False), ((1024, 1024), True), ((1 << 20,), False), ((1 << 20,), False)]
    said = {
        "timeline": 1,
        "rows": 8,
        "dtype": "float32",
        "forward": [["layer", 4 * LAYER_S]],
        "backward": {form: [[i, LAYER_S] for i in range(4)] for form in (DENSE, FACTORS)},
        "pieces": [
            {
                "names": [f"layer{i}"],
                "shapes": [shape],
                "linear": linear,
                "factor_rows": 8 * linear,
                "product_seconds": 0.002 * linear,
            }
            for i, (shape, linear) in enumerate(shapes)
        ],
        "update_seconds": 0.01,
    }
    path.write_text(json.dumps(said))
    return StepModel.of(said)


@pytest.mark.dear
@needs_cluster
@pytest.mark.parametrize(("rate", "delay_ms"), [("300mbit", 0.0), pytest.param("200mbit", 20.0, marks=needs_tun)])
def test_a_replayed_line_takes_what_was_predicted_over_a_real_wire(rate, delay_ms, tmp_path):
    """Bounds, since other work on the machine only ever adds, and a shaped cable lets a first megabyte through."""
    mine = write_timeline(tmp_path / "line.json")
    with Cluster(2, rate, delay_ms) as cluster:
        command = [sys.executable, str(HERE / "scripts" / "replayed.py"), str(tmp_path), str(STEPS)]
        nodes = [cluster.start(n, command, {"PYTHONPATH": launching.python_path()}, cwd=tmp_path) for n in range(2)]
        assert [node.wait(100) for node in nodes] == [0, 0]
    said = json.loads((tmp_path / "said.json").read_text())
    wires = NetworkMeasurement.of(said["wires"])
    cable, delay_s = bits_per_s(rate) / 8, delay_ms / 1e3
    # a slope between medians of few is off by so much where others use the machine
    assert 0.3 * cable < wires.pairs[0].bytes_per_s < 1.3 * cable, "measured through the cable's limit"
    assert delay_s < wires.pairs[0].latency_s < delay_s + 0.05
    seen = predict([mine, mine], wires.model_for([0, 1]), said["forms"])
    assert seen.sent_bytes == pytest.approx(said["sent_bytes"], rel=0.02)
    assert said["forms"][1] == FACTORS
    assert seen.exposed_s > 0
    assert seen.step_s < 3 * max(said["steps_s"])
    best = predict([mine, mine], NetworkModel(delay_s, cable), said["forms"])
    assert 0.85 * best.step_s < min(said["steps_s"]) < 1.6 * seen.step_s + 0.03


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_all_pairs_of_ranks_are_measured_in_rounds_in_which_nobody_is_twice(size):
    rounds = list(pair_rounds(size))
    for pairs in rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(one, other) for one in range(size) for other in range(one + 1, size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_is_told_the_same_of_the_wire(size):
    found = ranks.run(size, measure)
    assert all(one == found[0] for one in found)
    assert len(found[0].pairs) == size * (size - 1) // 2
    assert all(pair.latency_s > 0 and pair.bytes_per_s > 0 for pair in found[0].pairs)
    assert NetworkMeasurement.of(json.loads(json.dumps(found[0].to_dict()))) == found[0]
    alone = found[0].model_for([0])
    assert (alone.latency_s, alone.bytes_per_s) == (0.0, float("inf"))


def test_a_slope_is_that_of_the_larger_messages_whatever_every_message_costs():
    sizes = [1 << shift for shift in range(16, 24)]
    assert slope(sizes, [0.01 + size / 1e8 for size in sizes]) == pytest.approx(1e-8)
    limited = [max(0.0, size - (1 << 20)) / 1e7 + size / 1e9 for size in sizes]  # the first megabyte passes
    assert slope(sizes, limited) == pytest.approx(1e-7 + 1e-9)


@pytest.fixture
def clock(monkeypatch):
    """Of the measurement: a busy machine takes no part in what its messages take."""
    clock = VirtualTime()
    clock.process_time = time.process_time
    monkeypatch.setattr(measuring, "time", clock)
    return clock


class Slowed(memory.Link):
    def __init__(self, hub, rank, clock):
        super().__init__(hub, rank)
        self.clock = clock


class Far(Slowed):
    """25 MB/s, and 20 ms for each message, more or less."""

    def _travel(self, trips, num_bytes):
        self.clock.sleep(0.02 * trips * random.uniform(0.9, 1.3) + num_bytes / 2.5e7)

    def send(self, tensor, peer, tag=0):
        self._travel(1, tensor.nbytes)
        return super().send(tensor, peer, tag)

    def sum(self, tensor, what=""):
        if self.rank == 0:  # all travel at the same time
            self._travel(2, tensor.nbytes)
        return super().sum(tensor, what)


def test_bytes_are_measured_where_they_show_beside_the_latency(clock):
    """Story: sums of 4 and 16 KiB over 20 ms were told apart by noise alone, and steps of 2 s predicted to take 38."""
    hub = memory.Hub(2)
    wire = ranks.run(2, measure, [Far(hub, rank, clock) for rank in range(2)])[0].model_for([0, 1])
    assert 0.018 < wire.latency_s < 0.03
    assert 1.2e7 < wire.bytes_per_s < 4e7
    assert wire.adding_s < 0.5 / 2.5e7


class Stalling(Slowed):
    """10 MB/s; the first ping that counts, and the first message of 256 KiB, are held up by 50 ms."""

    latency_s = 0.0

    def __init__(self, hub, rank, clock):
        super().__init__(hub, rank, clock)
        self.counts = Counter()

    def send(self, tensor, peer, tag=0):
        self.counts[tensor.nbytes] += 1
        stalls = tensor.nbytes in (measuring.PING_BYTES, 256 << 10) and self.counts[tensor.nbytes] == 2
        self.clock.sleep(self.latency_s / 2 + tensor.nbytes / 1e7 + 0.05 * stalls)
        return super().send(tensor, peer, tag)


class FarStalling(Stalling):
    latency_s = 0.012


@pytest.mark.parametrize("kind", [Stalling, FarStalling])
def test_one_message_that_is_held_up_is_no_part_of_the_line(kind, clock, monkeypatch):
    """Story: one stall of two pings made a near line a far one, and steps were predicted to take its latency."""
    monkeypatch.setattr(measuring, "BUDGET_S", 0.01)  # three sizes, of which two tell the rate
    hub = memory.Hub(2)
    pair = ranks.run(2, measure, [kind(hub, rank, clock) for rank in range(2)])[0].pairs[0]
    assert kind.latency_s / 2 <= pair.latency_s < kind.latency_s / 2 + 0.005
    assert 0.5e7 < pair.bytes_per_s < 2e7


class Endless(memory.Link):
    """A message takes 20 ms, whatever it holds."""

    largest = 0

    def send(self, tensor, peer, tag=0):
        Endless.largest = max(Endless.largest, tensor.nbytes)
        time.sleep(0.02 * (tensor.nbytes >= measuring.PING_BYTES))
        return super().send(tensor, peer, tag)


def test_where_no_bytes_show_the_rate_has_a_bound_and_the_largest_sums_are_made(monkeypatch):
    """Story: over 50 ms, noise of 4 MiB told the rate, and adding up was said to cost nothing."""
    monkeypatch.setattr(measuring, "slope", lambda *_: 1e-15)  # as noise may have it
    hub = memory.Hub(2)
    wires = ranks.run(2, measure, [Endless(hub, rank) for rank in range(2)])[0]
    assert Endless.largest == measuring.LARGEST
    assert wires.pairs[0].bytes_per_s <= measuring.LARGEST / (measuring.MIN_TRANSFER * 0.02)
    assert [size for size, _ in wires.sums][-3:] == [2 << 20, 4 << 20, 8 << 20]
    assert wires.cpu_s > 0


class Distant(memory.Link):
    """Between ranks 0 and 2 each message takes longer, and each of its bytes."""

    def send(self, tensor, peer, tag=0):
        if {self.rank, peer} == {0, 2}:
            time.sleep(0.003 + tensor.nbytes / 2e7)
        return super().send(tensor, peer, tag)


def test_one_slow_pair_of_three_is_known_by_the_names_of_its_hosts(tmp_path):
    hub = memory.Hub(3)
    wires = ranks.run(3, measure, [Distant(hub, rank) for rank in range(3)])[0]
    names = ["a.example", "b", "c"]
    pairs = tuple(Between(names[p.one], names[p.other], p.latency_s, p.bytes_per_s) for p in wires.pairs)
    assert [(pair.one, pair.other) for pair in pairs] == [("a.example", "b"), ("a.example", "c"), ("b", "c")]
    near, far, other = pairs
    assert far.latency_s >= 0.003 / 2
    assert far.bytes_per_s <= 1.1 * 2e7
    assert min(near.bytes_per_s, other.bytes_per_s) > 2 * far.bytes_per_s
    assert wires.model_for([0, 1, 2]).bytes_per_s == far.bytes_per_s
    plan = Plan("sequential", pairs=pairs)
    plan.write(tmp_path / "plan.toml")
    assert Plan.read(tmp_path / "plan.toml") == Plan.of(json.loads(plan.to_json())) == plan
    said = printed(pair_table(pairs)).splitlines()
    assert [line.split()[:2] for line in said[1:]] == [[pair.one, pair.other] for pair in pairs]
    assert said[2].split()[2:] == [f"{far.latency_s * 1e3:.2f}", f"{far.bytes_per_s / 1e6:.1f}"]


def test_of_many_pairs_the_slowest_are_shown():
    said = printed(pair_table([Between("a", f"b{i}", 1e-4, 1e6 * (100 - i)) for i in range(28)]))
    assert "the slowest 15 of 28 pairs" in said
    assert "b27" in said
    assert "b12" not in said


def printed(table):
    out = Console(width=200, record=True, file=io.StringIO())
    out.print(table)
    return out.export_text()


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_a_chosen_collective_is_predicted_by_its_own_cost(name, nodes):
    part = LayerTiming("dense", 99_991)
    wire = NetworkModel(1e-3, 1e6, 1e-7, collectives=collectives_by(name))
    seen = predict([line(part, forward_s=0.0, update_s=0.0)] * nodes, wire, [DENSE])
    cost, votes = Collective(name).cost(nodes, 4 * part.numel), nodes - 1
    assert seen.sent_bytes == cost.bytes + votes * VOTE_BYTES
    sum_s = cost.steps * 1e-3 + cost.in_sequence * (1e-6 + 1e-7)
    assert seen.wire_s == pytest.approx(sum_s + votes * (1e-3 + VOTE_BYTES * 1e-6))


def test_a_layer_travels_as_the_chosen_collective_makes_cheaper():
    """Among eight a ring's sum has 1.75 n in sequence and a tree's 6 n: between them is what multiplying takes."""
    part = LayerTiming("wide", 1_000_000, 2000, 60.0, product_s=0.9)
    for costs, form in ((ring, DENSE), (collectives_by("ring"), DENSE), (collectives_by("binomial"), FACTORS)):
        seen = predict([line(part, rows=60.0)] * 8, NetworkModel(0.0, 1e6, collectives=costs))
        assert seen.forms == (form,)
        assert seen.why[0].startswith(f"wide {form}")


def test_what_adding_costs_is_what_a_sum_takes_beyond_its_own_way():
    """Bytes in sequence on a line of 100 MB/s, and 5 ns more for each: whatever the algorithm."""
    pairs = tuple(Pair(i, j, 0.0, 1e8) for i in range(4) for j in range(i + 1, 4))
    for name in ("", "ring", "halving", "binomial"):
        costs = collectives_by(name)
        took = [(1 << k, costs(4)(SUM, 1 << k).in_sequence * 1.5e-8) for k in range(18, 24)]
        assert NetworkMeasurement(4, pairs, tuple(took)).model_for(range(4), costs).adding_s == pytest.approx(5e-9), (
            name
        )


def test_a_team_has_to_do_with_its_slowest_line():
    pairs = Pair(0, 1, 1e-4, 1e8), Pair(0, 2, 5e-3, 1e9), Pair(1, 2, 1e-4, 1e6)
    wires = NetworkMeasurement(3, pairs)
    assert wires.model_for([0, 1]) == NetworkModel(1e-4, 1e8)
    assert wires.model_for([0, 1, 2]) == NetworkModel(5e-3, 1e6)
