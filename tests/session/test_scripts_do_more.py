"""What scripts do to a model after all have joined, and models that are not alike everywhere: exact, or refused."""

import contextlib
import copy
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import launching
import paceline
import ranks
from device import DEVICE, of_cpus
from nodes import IN, OPTIMIZERS, OUT, WIDE, Rank, Sometimes, Whole, build, gap, reference, rows
from paceline.data.batches import UserBatch
from paceline.data.sampler import Assignment
from paceline.elastic.consistency import compare
from paceline.engine.compute.precision import Numerics
from paceline.engine.sequential import Engine
from paceline.errors import NoGradient
from paceline.exchange.allreduce import Exchange
from paceline.job import Job
from paceline.link.memory import world
from paceline.messages import FACTORS
from paceline.registry import parse
from paceline.step import buffer_broadcast

BATCHES = [rows(24, seed) for seed in range(4)]


@pytest.mark.parametrize("exchange", ["allreduce", "local_sgd:period=1"])
def test_weights_that_were_given_other_memory_are_still_everyones(exchange):
    """Story: averages were written where the weights had been, and replicas parted without a word."""

    def work(link):
        rank = Rank(link, build(), OPTIMIZERS["sgd"], exchange)
        rank.train(BATCHES[:1])
        for parameter in rank.model.parameters():
            parameter.data = parameter.data.clone()
        before = rank.engine._hash()
        rank.train(BATCHES[1:])
        return rank.state(), before != rank.engine._hash()

    (one, changed), (other, _) = ranks.run(2, work)
    assert gap(one, other) == 0.0
    assert changed, "the checksum is of what trains"


@pytest.mark.dear
def test_processes_of_a_node_refuse_weights_in_other_memory(tmp_path):
    script = launching.small(
        tmp_path,
        "rows = torch.randn(8, 4), torch.arange(8) % 2",
        "pace.step(rows)",
        "model.weight.data = model.weight.data.clone()",
        "pace.step(rows)",
    )
    done = launching.launch(str(script), engine="processes:2", code=1)
    assert "parameter 'weight' was given other memory after join()" in done.stderr


@pytest.mark.parametrize("engine", ["sequential", "replicas:2"])
def test_parameters_that_come_after_join_are_refused_and_known_ones_are_not(engine):
    model, rest = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), (torch.randn(8, 4), torch.arange(8) % 2)
    plain = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each[0].parameters(), 0.1) for each in (model, plain))
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=8, engine=engine) as pace:
        for known in (False, True):
            if known:
                optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.2})
                other.add_param_group({"params": plain[1].parameters(), "lr": 0.2})
            pace.step(rest)
            plain.zero_grad()
            F.cross_entropy(plain(rest[0]), rest[1]).backward()
            other.step()
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine, its, rtol=1e-5)
        model.append(extra := nn.Linear(2, 2))
        optimizer.add_param_group({"params": extra.parameters()})
        with pytest.raises(ValueError, match="given parameters after join"):
            pace.step(rest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_weights_have_the_norm_that_their_gradient_has(dtype):
    """Story: squares of fp16 factors overflowed, and a finite gradient ended training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 3)).to(dtype)
    x, y = torch.randint(0, 256, (16, 784)).to(dtype), torch.arange(16) % 3
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(x).float(), y).backward()
    norm = sum(float(each.grad.double().norm()) ** 2 for each in plain.parameters()) ** 0.5
    assert norm > 100, "squares do not fit 16 bits"

    def loss(output, target):
        return F.cross_entropy(output.float(), target)

    for kind in (torch.optim.SGD, torch.optim.Adam):
        mine = copy.deepcopy(model)
        optimizer = kind(mine.parameters(), 1e-6)
        with paceline.join(mine, optimizer, loss, batch_size=16, engine="sequential", clip=1e9) as pace:
            pace.step((x, y))
            # the gradient itself is rounded to 8 or 11 bits, value by value
            assert pace.grad_norm == pytest.approx(norm, rel=1e-2)


class Fine(nn.Module):
    """A body in 16 bits, and a part that its author keeps in 32."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(IN, WIDE), nn.Linear(WIDE, OUT)
        self.body, self.fine = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x):
        h = F.relu(self.body(F.relu(self.first(x))))
        with torch.autocast(DEVICE.type, enabled=False):
            return self.head(torch.tanh(self.fine(h.float() * 1.001)))


def test_a_layer_that_is_computed_in_32_bits_is_not_sent_in_16():
    model = build(Fine).float()
    data = [rows(24, 1, torch.float32)]

    def work(link):
        engine = Engine()
        engine.numerics = Numerics(precision="bf16")
        exchange = Exchange(forms=FACTORS)
        exchange.factor_codec = parse("codec", "half:bf16")
        rank = Rank(link, model, OPTIMIZERS["sgd"], exchange, engine=engine)
        rank.train(data)
        forms = dict(zip((bucket.names[0] for bucket in engine.buckets), exchange.forms(), strict=True))
        return rank.state(), forms

    plain = copy.deepcopy(model)
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    for x, y in data:
        plain.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            value = F.cross_entropy(plain(x), y)
        value.backward()
        optimizer.step()
    for state, forms in ranks.run(2, work):
        assert forms["body.weight"] == FACTORS != forms["fine.weight"]
        began, ended = model.fine.weight.detach(), plain.fine.weight.detach()
        moved, wanted = state["fine.weight"] - began, ended - began
        # sixteen bits on the wire would be off by 2e-3
        assert float((moved - wanted).norm() / wanted.norm()) < 1e-5


OWING = "feedback/topk:keep=0.1"


def owed(rank):
    return {i: memory[0].clone() for i, memory in rank.exchange.memory.items() if memory[0] is not None}


def _counted(output, target):
    kept = target >= 0
    return (F.cross_entropy(output, target.clamp_min(0), reduction="none") * kept).sum(), kept.sum()


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_a_step_that_counts_nothing_leaves_what_is_owed(overlap):
    def work(link):
        exchange = Exchange("dense")
        exchange.overlap = overlap
        rank = Rank(link, build(), OPTIMIZERS["sgd"], exchange, OWING, loss=_counted)
        rank.train(BATCHES[:1])
        rank.engine.wait_pending()
        before, weights = owed(rank), rank.state()
        x, y = BATCHES[1]
        with pytest.raises(NoGradient, match="every process's weight is 0"):
            rank.step(Whole((x, torch.full_like(y, -1))))
        rank.engine.wait_pending()
        after = owed(rank)
        rank.exchange.close()
        return gap(rank.state(), weights), [float((before[i] - after[i]).abs().max()) for i in before], len(before)

    for moved, changed, count in ranks.run(2, work):
        assert moved == 0.0
        assert count > 0
        assert max(changed) == 0.0


@pytest.mark.parametrize("kept", ["rare.weight", "rare_small.bias"], ids=["alone", "with others in a bucket"])
def test_what_is_owed_to_a_branch_that_nobody_takes_stays_owed(kept):
    def work(link):
        rank = Rank(link, build(Sometimes), OPTIMIZERS["sgd"], Exchange("dense"), OWING)
        x, y = rows(24, 1)
        taken, left = x.clone(), x.clone()
        taken[:, 0], left[:, 0] = 2.0, 0.0
        (bucket,) = [bucket for bucket in rank.engine.buckets if kept in bucket.names]
        first = sum(bucket.numels[: bucket.names.index(kept)])
        place = slice(first, first + bucket.numels[bucket.names.index(kept)])
        rank.train([(taken, y)])
        before, weights = owed(rank)[bucket.index], rank.state()
        rank.train([(left, y)])
        after, moved = owed(rank)[bucket.index], not torch.equal(weights[kept], rank.state()[kept])
        return float((before[place] - after[place]).abs().max()), float(before.abs().max()), moved

    for changed, most, moved in ranks.run(2, work):
        assert most > 0
        assert changed == 0.0
        assert not moved


def test_a_layer_that_owes_does_not_become_factors():
    def work(link):
        rank = Rank(link, build(), OPTIMIZERS["sgd"], "allreduce:forms=bytes", OWING, batch=96)
        choice = rank.exchange.choice
        (index,) = [bucket.index for bucket in rank.engine.buckets if "second.weight" in bucket.names]
        rank.step(Whole(rows(150, 0)))
        before = rank.exchange.forms()[index], index in owed(rank)
        choice.total, choice.most = [24] * len(choice.buckets), [12] * len(choice.buckets)
        rank.exchange.on_assignment(0.5)
        return before, rank.exchange.forms()[index]

    assert ranks.run(2, work) == [(("dense", True), "dense")] * 2


class Rotary(nn.Module):
    """Keeps something for as many rows as it has seen."""

    def __init__(self, persistent):
        super().__init__()
        self.layer = nn.Linear(IN, OUT)
        self.register_buffer("still", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(1), persistent=persistent)


def test_a_cache_of_another_size_is_each_nodes_own_unless_it_is_saved():
    """Story: the library below ended a node by a signal as all began to evaluate."""

    def work(link):
        found = []
        for persistent in (False, True):
            rank = Rank(link, Rotary(persistent))
            rank.model.cache = torch.full((3 + link.rank,), 1.0 * link.rank)
            rank.model.still = torch.full((2,), 1.0 + link.rank)
            try:
                buffer_broadcast.broadcast_buffers(rank.model, rank.engine, rank.control)
            except ValueError as error:
                found.append(str(error))
            else:
                found.append((rank.model.cache.tolist(), rank.model.still.tolist()))
        return found

    for rank, (own, refused) in enumerate(ranks.run(2, work)):
        assert own == ([float(rank)] * (3 + rank), [1.0, 1.0])
        assert "buffer 'cache' has another shape or type in another process" in refused


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(IN, OUT, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.turn).abs()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("exchange", "codec", "near"), [("allreduce", "half", 0.02), ("ordered", "none", 1e-11)])
def test_complex_gradients_keep_both_their_parts(exchange, codec, near, size):
    torch.manual_seed(3)
    model = Turning().to(DEVICE)

    def work(link):
        rank = Rank(link, model, OPTIMIZERS["sgd"], exchange, codec)
        rank.train(BATCHES)
        return rank.state()["turn"] - model.turn.detach()

    want = reference(model, BATCHES, OPTIMIZERS["sgd"])[0]["turn"] - model.turn.detach()
    for moved in ranks.run(size, work):
        assert float((moved - want).abs().max()) < near * float(want.imag.abs().max())


@pytest.mark.parametrize(
    ("differently", "told"),
    [
        ({"codec": "feedback/topk:keep=0.2"}, "codec"),
        ({"step_size": 7}, "numbers of the scheduler"),
        ({}, ""),
    ],
)
def test_nodes_whose_codec_or_schedule_has_other_numbers_are_told(differently, told):
    def work(link):
        given = {"codec": OWING, "step_size": 5, **(differently if link.rank else {})}
        model = build()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, given["step_size"])
        job, engine = Job(model, optimizer, F.cross_entropy, 8, scheduler=scheduler), Engine()
        engine.open(model, optimizer, job.loss)
        compare(link, job, engine, Exchange(), parse("codec", given["codec"]))

    if not told:
        ranks.run(2, work)
        return
    with pytest.raises(ValueError, match=f"given different {told}"):
        ranks.run(2, work)


@pytest.mark.parametrize("where", ["layer", "everywhere"])
def test_a_hook_that_comes_before_ours_changes_what_the_layer_gives(where):
    """Story: its factors were those of the changed output, and the weight's gradient half of what it is."""

    def twice(module, args, output):
        return 2 * output if isinstance(module, nn.Linear) else None

    def hooked(model):
        if where == "layer":
            return model.second.register_forward_hook(twice, prepend=True)
        return torch.nn.modules.module.register_module_forward_hook(twice)

    model, plain = build(), build()
    rank = Rank(world(1)[0], model, OPTIMIZERS["sgd"])
    assert rank.exchange.forms().count(FACTORS) == 2
    for each in (rank.model, plain):
        handle = hooked(each)
        try:
            if each is rank.model:
                rank.train(BATCHES)
            else:
                optimizer = OPTIMIZERS["sgd"](plain.parameters())
                for x, y in BATCHES:
                    optimizer.zero_grad()
                    F.cross_entropy(plain(x), y).backward()
                    optimizer.step()
        finally:
            handle.remove()
    assert gap(rank.state(), plain.state_dict()) < 1e-12


def test_a_hook_on_a_gradient_that_comes_after_ours_sees_each_nodes_own():
    """Story: the sum was begun while the hook still ran, and held its change on one node, by chance on none."""
    model, most, step = build(), 1e-3, 0.5

    def work(link):
        rank = Rank(link, model, lambda parameters: torch.optim.SGD(parameters, step))

        def clamp(parameter):
            time.sleep(0.01)
            parameter.grad.clamp_(-most, most)

        for parameter in rank.model.parameters():
            parameter.register_post_accumulate_grad_hook(clamp)
        rank.train(BATCHES[:1])
        return rank.state()

    want, (x, y) = copy.deepcopy(model), BATCHES[0]
    grads = {name: torch.zeros_like(parameter) for name, parameter in want.named_parameters()}
    for half in (slice(0, 12), slice(12, 24)):
        want.zero_grad()
        (F.cross_entropy(want(x[half]), y[half], reduction="sum") / 24).backward()
        for name, parameter in want.named_parameters():
            grads[name] += parameter.grad.clamp(-most, most)
    with torch.no_grad():
        for name, parameter in want.named_parameters():
            parameter.sub_(step * grads[name])
    for state in ranks.run(2, work):
        assert gap(state, want.state_dict()) < 1e-12


def test_a_process_whose_own_rows_are_none_has_no_rows():
    """Story: the mean over no rows is no number, and ended the run."""
    model, (x, y) = build(), rows(5, 1)

    def work(link):
        rank = Rank(link, model, OPTIMIZERS["sgd"])
        for part in ((x[:1], y[:1]), (x[1:], y[1:])):
            mine = tuple(each[link.rank :: 2] for each in part)
            rank.step(UserBatch(mine, float(len(part[0]))))
        return rank.state()

    want, _ = reference(model, [(x[:1], y[:1]), (x[1:], y[1:])], OPTIMIZERS["sgd"])
    for state in ranks.run(2, work):
        assert gap(state, want) < 1e-12


@pytest.mark.parametrize("engine", ["replicas:2", pytest.param("reproducible:2", marks=of_cpus)])
def test_an_empty_batch_is_no_batch_in_any_engine(engine):
    model = build()
    made = parse("engine", engine)
    made.open(model, OPTIMIZERS["sgd"](model.parameters()), F.cross_entropy)
    made.begin_step(Assignment(), 0)
    gradients = []
    x, y = rows(4, 1)
    vote = made.gradient((x[:0], y[:0]), 1.0, ["dense"] * len(made.buckets), gradients.append)
    assert (vote.weight, vote.finite, len(gradients)) == (0.0, True, len(made.buckets))
    made.close()


def test_a_process_without_rows_settles_where_the_others_do():
    rank, seen = Rank(world(1)[0], build()), []

    @contextlib.contextmanager
    def step(present):
        seen.append("in")
        yield
        seen.append("out")

    rank.engine._in_step, rank.engine.wait_pending = step, lambda: seen.append("settled")
    rank.engine.gradient(None, 1.0, rank.exchange.forms(), lambda gradient: None)
    assert seen == ["in", "settled", "out"]
