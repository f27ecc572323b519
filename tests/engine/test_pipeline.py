"""A pipeline is sequential with as many micro-batches, bit by bit, whatever its schedule and cut."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from test_gradients_inside import Curved, Penalised, Sharp
from test_what_forward_changes import Follower
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import paceline
import ranks
from device import of_cpus
from nodes import HIDDEN, IN, MODELS, OPTIMIZERS, OUT, Normed, Plain, Rank, Wide, build, gap, reference, rows
from paceline.engine import pipeline, sequential
from paceline.engine.compute.precision import Numerics
from paceline.engine.stages.schedule import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    Pass,
    ends,
    in_flight,
    step_s,
    table,
)
from paceline.link.memory import world
from paceline.registry import parse
from paceline_bench.cluster.work import Transformer

pytestmark = of_cpus
BATCH = 24
DENSE, FACTORS = "allreduce:forms=dense", "allreduce:forms=factors"
DATA = [rows(BATCH, seed) for seed in range(5)]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def train(engine, model, optimizer="adamw", data=DATA, size=1, accumulate=1, clip=None, exchange=DENSE):
    def work(link):
        made = engine()
        made.accumulate = accumulate
        rank = Rank(
            link, model, OPTIMIZERS[optimizer], engine=made, clip=clip, batch=len(data[0][0]), exchange=exchange
        )
        torch.set_num_threads(1)  # of the update: with others products have other last bits
        losses = rank.train(data)
        assert "factors" in rank.exchange.forms() or exchange != FACTORS or type(model) is not Plain
        made.close()
        return rank.state(), losses

    return ranks.run(size, work)


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


# schedules


@every_schedule
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micros", [1, 2, 3, 8])
def test_every_pass_is_made_once_after_what_it_needs(schedule, stages, micros):
    made = SCHEDULES[schedule](stages, micros)
    whole = sorted(Pass(kind, micro) for kind in (FORWARD, BACKWARD) for micro in range(micros))
    found = ends(made, lambda stage, one: 1.0 if one.kind == FORWARD else 2.0)
    for stage, passes in enumerate(made):
        assert sorted(passes) == whole
        for kind in (FORWARD, BACKWARD):  # gradients are added in one order
            assert [one.micro for one in passes if one.kind == kind] == list(range(micros))
        for micro in range(micros):
            assert found[stage, Pass(FORWARD, micro)] < found[stage, Pass(BACKWARD, micro)]
            if stage:
                assert found[stage - 1, Pass(FORWARD, micro)] < found[stage, Pass(FORWARD, micro)]
                assert found[stage, Pass(BACKWARD, micro)] < found[stage - 1, Pass(BACKWARD, micro)]
    # (micros + stages - 1) forward and backward passes in a row
    assert step_s(made, lambda stage, one: 1.0 if one.kind == FORWARD else 2.0) == 3 * (micros + stages - 1)


def test_what_a_stage_holds():
    assert in_flight(SCHEDULES["gpipe"](3, 8)) == [8, 8, 8]
    assert in_flight(SCHEDULES["1f1b"](3, 8)) == [3, 2, 1]


TABLES = {
    ("gpipe", 2, 2): """
stage 0  F0 F1 .  .  .  B0 B0 B1 B1
stage 1  .  F0 F1 B0 B0 B1 B1 .  .
9 ticks, 33% idle; micro-batches in flight: 2, 2""",
    ("1f1b", 2, 4): """
stage 0  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
stage 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .
15 ticks, 20% idle; micro-batches in flight: 2, 1""",
}


@pytest.mark.parametrize("of", TABLES)
def test_a_schedule_is_a_table(of):
    name, stages, micros = of
    assert table(SCHEDULES[name](stages, micros)) == TABLES[of].strip()
    assert f" {(stages - 1) / (micros + stages - 1):.0%} idle" in TABLES[of], "the bubble of the definition"


def test_a_schedule_that_waits_for_itself_is_an_error():
    with pytest.raises(ValueError, match="waits for itself"):
        ends([[Pass(BACKWARD, 0), Pass(FORWARD, 0)]], lambda stage, one: 1.0)


# the engine


@every_schedule
@pytest.mark.parametrize("cut", ["", "second", "head"])
@pytest.mark.parametrize(
    ("optimizer", "size", "exchange"),
    [
        ("adamw", 1, DENSE),
        ("momentum", 2, DENSE),
        ("adamw", 3, DENSE),
        ("momentum", 1, FACTORS),
        ("momentum", 2, FACTORS),
        ("adamw", 2, FACTORS),
    ],
)
def test_equals_sequential_with_micro_batches_bit_by_bit(schedule, cut, optimizer, size, exchange):
    model = build()
    want = train(sequential.Engine, model, optimizer, size=size, accumulate=4, exchange=exchange)
    found = train(lambda: pipeline.Engine(2, 4, schedule, cut), model, optimizer, size=size, exchange=exchange)
    for (state, losses), (its, its_losses) in zip(want, found, strict=True):
        assert losses == its_losses
        assert same(state, its)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("clip", "exchange"), [(None, DENSE), (0.05, DENSE), (None, FACTORS), (0.05, FACTORS)])
def test_every_model_equals_plain_pytorch(kind, clip, exchange):
    """Also where a weight is tied across the cut, a layer is called twice, a branch is taken by some rows."""
    model = build(MODELS[kind])
    want, losses = reference(model, DATA, OPTIMIZERS["momentum"], clip)
    ((state, found),) = train(lambda: pipeline.Engine(2, 3), model, "momentum", clip=clip, exchange=exchange)
    assert gap(state, want) < 1e-12
    assert found == pytest.approx(losses, rel=1e-12)


def test_nor_do_micro_batches_share_rounded_weights():
    """Story: under autocast torch keeps them for all threads, and a stage's gradients were added in another."""
    model, data = build(Wide, torch.float32), [rows(BATCH, seed, torch.float32) for seed in range(12)]

    def rounded(engine):
        engine.numerics = Numerics.parse(["bf16"])
        return engine

    ((want, losses),) = train(lambda: rounded(sequential.Engine()), model, "momentum", data, accumulate=4)
    cut = partial(pipeline.Engine, 2, 4, cut="second")
    ((state, found),) = train(lambda: rounded(cut()), model, "momentum", data)
    assert losses == found
    assert same(state, want)


class Steep(Plain):
    """The second stage differentiates by what came across the cut."""

    def forward(self, x):
        h = F.relu(self.first(x))
        out = self.second(h)
        (slope,) = torch.autograd.grad(out.square().sum(), h, create_graph=True)
        return self.head(F.relu(out)) + F.pad(slope.square().sum(1, keepdim=True), (0, OUT - 1)) * 0.01


@pytest.mark.parametrize("exchange", [DENSE, FACTORS])
def test_a_gradient_that_forward_computes_is_not_that_of_the_step(exchange):
    """Other micro-batches are in their backward pass meanwhile."""
    model = build(Steep)
    want, losses = reference(model, DATA, OPTIMIZERS["momentum"])
    made = partial(pipeline.Engine, 2, 4, cut="second")
    ((state, found),) = train(made, model, "momentum", exchange=exchange)
    assert gap(state, want) < 1e-12
    assert found == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("kind", [Penalised, Sharp, Curved])
def test_a_gradient_of_the_whole_model_inside_of_it_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=r"cut the (model|pipeline) elsewhere"):
        train(lambda: pipeline.Engine(2, 4, cut="second"), build(kind), "momentum")


class Deep(nn.Sequential):
    def __init__(self):
        widths = IN, HIDDEN, HIDDEN, 20, OUT
        super().__init__(*(nn.Linear(before, after) for before, after in pairwise(widths)))


@pytest.mark.parametrize("stages", [3, 4])
def test_more_stages(stages):
    model = build(Deep)
    want = train(sequential.Engine, model, accumulate=6)[0][0]
    for cut in ("1;2;3"[: 2 * stages - 3], ""):
        found = train(lambda cut=cut: pipeline.Engine(stages, 6, cut=cut), model)[0][0]
        assert same(want, found)


def test_one_stage_is_sequential():
    model = build()
    assert same(train(sequential.Engine, model)[0][0], train(lambda: pipeline.Engine(1, 8), model)[0][0])


def test_batch_statistics_are_those_of_micro_batches():
    model = build(Normed)
    want = train(sequential.Engine, model, accumulate=4)[0][0]
    assert same(want, train(lambda: pipeline.Engine(2, 4), model)[0][0])


@pytest.mark.parametrize("micros", [1, 4])
def test_stages_do_compute_in_the_order_of_the_schedule(micros):
    """A single micro-batch is plain model parallelism."""
    begun = []

    class Seen(Plain):
        def forward(self, x):
            begun.append(len(x))
            return super().forward(x)

    made = pipeline.Engine(2, micros, "1f1b", "second")
    rank = ranks.run(1, lambda link: Rank(link, build(Seen), engine=made))[0]
    rank.train(DATA)
    assert begun == [BATCH // micros] * micros * len(DATA)
    passes = {Pass(kind, micro) for kind in (FORWARD, BACKWARD) for micro in range(micros)}
    assert set(made.backward.seconds) == {(stage, each) for stage in range(2) for each in passes}
    made.close()


class Skips(nn.Module):
    """What crosses the cut is not the input of one module alone, and a first ReLU works in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.relu, self.c = (
            nn.Linear(IN, 40),
            nn.Linear(IN, 40),
            nn.ReLU(inplace=True),
            nn.Linear(40, 3),
        )

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return self.c(self.relu(a)) + self.c.bias * b.sum(1, keepdim=True) * 0.1


@pytest.mark.parametrize("exchange", [DENSE, FACTORS])
@pytest.mark.parametrize("cut", ["b", "relu", "c"])
def test_connections_that_go_around_the_cut(cut, exchange):
    torch.manual_seed(1)
    model = Skips().double()
    data = [(torch.randn(12, IN, dtype=torch.float64), torch.arange(12) % 3) for _ in range(4)]
    want, _ = reference(model, data, OPTIMIZERS["sgd"])
    ((state, _),) = train(lambda: pipeline.Engine(2, 3, cut=cut), model, "sgd", data, exchange=exchange)
    assert gap(state, want) < 1e-12


@pytest.mark.parametrize("exchange", [DENSE, FACTORS])
def test_a_cut_between_a_layer_and_its_activation(exchange):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU()).double()
    data = [(torch.randn(12, 64, dtype=torch.float64), torch.arange(12) % 9) for _ in range(3)]
    want, _ = reference(model, data, OPTIMIZERS["sgd"])
    ((state, _),) = train(lambda: pipeline.Engine(2, 2, cut="1"), model, "sgd", data, exchange=exchange)
    assert gap(state, want) < 1e-12


@pytest.mark.parametrize("cut", ["", "head"])
def test_a_model_whose_forward_changes_frozen_weights_is_refused_and_left_as_it_was(cut):
    """Story: every small model with frozen weights was refused in its first step."""
    model = build(Follower)
    rank = Rank(world(1)[0], model, engine=pipeline.Engine(2, 4, cut=cut))
    with pytest.raises(ValueError, match=r"forward of this model changes 'target\.bias', which does not train"):
        rank.train(DATA)
    rank.engine.close()
    assert same(rank.state(), model.state_dict())


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"num_stages": 0}, "a whole number k >= 1, got 0"),
        ({"micros": -1}, "a whole number micros >= 0, got -1"),
        ({"schedule": "zigzag"}, "schedule is one of gpipe, 1f1b, got 'zigzag'"),
        ({"cut": "a;b"}, "has 1 cuts, cut='a;b' has 2"),
    ],
)
def test_wrong_options_are_refused(engine, said):
    with pytest.raises(ValueError, match=said):
        pipeline.Engine(**engine)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "threads:2/pipeline:2",
            "'threads' contains no other engine; of ours these do: processes",
        ),
        ("processes:2/replicas:2", "computed by pipeline alone, not by 'replicas'"),
    ],
)
def test_an_engine_is_inside_of_none_that_has_none(text, said):
    with pytest.raises(ValueError, match=said):
        parse("engine", text)


class Wanders(Plain):
    """The first stage uses the head's weight too, for some micro-batches, and the second stage only for the others."""

    def forward(self, x):
        aside = F.linear(torch.cat([x, x], 1)[:, :HIDDEN], self.head.weight) if x[0, 0] > 0 else 0.0
        h = F.relu(self.first(x))
        h = self.second(h)
        return aside + (F.linear(h, self.head.weight) if x[0, 0] < 0 else h[:, :OUT]) + self.head.bias


def test_a_weight_whose_gradient_two_stages_make_is_refused_by_name():
    """They would add to one gradient at once, and one of them might be lost."""
    model = build(Wanders)
    with pytest.raises(ValueError, match=r"parameter 'head.weight' is used by several stages.*\(at second now\)"):
        train(lambda: pipeline.Engine(2, 8, cut="second"), model)


def test_batch_norm_over_everyone_is_refused_by_name():
    model = build(Normed)
    with pytest.raises(ValueError, match="batch_norm='sync' needs all rows of a batch at once, not engine 'pipeline'"):
        paceline.join(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            F.cross_entropy,
            batch_size=8,
            engine="pipeline:2",
            batch_norm="sync",
        )


def test_a_script_names_it_and_evaluates_and_saves_as_ever(tmp_path):
    def run(engine):
        model = build()
        words = {"batch_size": BATCH, "engine": engine, "accumulate": 4 if engine == "sequential" else 1}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with paceline.join(model, optimizer, F.cross_entropy, folder=tmp_path / engine[:4], **words) as pace:
            torch.set_num_threads(1)
            for x, y in DATA:
                pace.step((x, y))
            found = pace.evaluate(list(zip(*DATA[0], strict=True)), lambda output, y: (output.argmax(1) == y).sum())
            pace.save()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            pace.step(DATA[0])
            assert not same(model.state_dict(), saved[0])
            assert pace.restore()
            restored = model.state_dict(), optimizer.state_dict()
            assert_close(restored, saved, rtol=0, atol=0)
        return saved, found

    (one, found), (other, its_found) = run("sequential"), run("pipeline:2,micros=4,cut=second")
    assert one[0].keys() == build().state_dict().keys()
    assert_close(other, one, rtol=0, atol=0)
    assert found == its_found


def test_a_transformer_is_cut_into_stages_of_like_memory():
    """Bytes of weights, gradients and momentum, by the stage that computes with them."""
    tokens = torch.arange(32).view(4, 8)
    made = pipeline.Engine(2, 2, cut="blocks.3")
    model = build(lambda: Transformer(4096, 8, 320, 6, 5), torch.float32)
    (rank,) = ranks.run(1, lambda link: Rank(link, model, OPTIMIZERS["momentum"], engine=made, batch=4))
    rank.train([(tokens, tokens)])
    held = [0, 0]
    for name, stage in made.backward._stages.items():
        weight = rank.model.get_parameter(name)
        held[stage] += 2 * weight.nbytes + rank.optimizer.state[weight]["momentum_buffer"].nbytes
    made.close()
    assert sum(held) == 3 * sum(weight.nbytes for weight in model.parameters())
    assert max(held) <= 0.6 * sum(held)
