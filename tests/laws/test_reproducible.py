"""The final weights are the same bits for any number of nodes, and whatever nodes are lost on the way."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from test_engines_are_transparent import HERE, START

import launching
import ranks
from device import of_cpus
from nodes import OPTIMIZERS, Conv, Plain, Rank, build, gap, reference, rows
from paceline.data.sampler import Assignment
from paceline.engine.reproducible import Engine
from paceline.exchange.flow.tree_sums import add_up, spans
from paceline.link.memory import world
from paceline.planner.choose import choose_requested
from paceline.planner.plan_file import Row
from paceline.registry import parse

pytestmark = of_cpus
SHARES = 8
BATCHES = [rows(24, seed) for seed in range(3)] + [rows(21, 9), rows(5, 10)]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train(size, model, batches=BATCHES, shares=None, num_shares=SHARES, **options):
    """Of each rank: weights and losses."""

    def work(link):
        engine = Engine(num_shares, num_threads=1)
        rank = Rank(link, model, exchange="ordered", engine=engine, **options)
        rank.run.assignment = Assignment(link.rank, link.size, shares=shares, virtual=num_shares)
        losses = rank.train(batches)
        rank.exchange.close()
        return rank.state(), losses

    return ranks.run(size, work)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_any_number_of_nodes_has_the_same_bits(optimizer):
    """Batches whose rows the shares do not divide, and one with fewer rows than shares, among them."""
    model = build(Plain)
    (alone, losses), *_ = train(1, model, optimizer=OPTIMIZERS[optimizer], clip=0.05)
    for size in (2, 3, 4, 9):
        for state, said in train(size, model, optimizer=OPTIMIZERS[optimizer], clip=0.05):
            assert same(state, alone), size
            assert said == losses
    want, want_losses = reference(model, BATCHES, OPTIMIZERS[optimizer], 0.05)
    assert gap(alone, want) < 1e-11
    assert losses == pytest.approx(want_losses, rel=1e-12)


@pytest.mark.parametrize("shares", [(1, 3), (5, 0, 2), (0.3, 0.4, 0.1, 0.2)])
def test_unequal_shares_have_the_same_bits(shares):
    model = build(Plain)
    ((alone, _),) = train(1, model)
    for state, _ in train(len(shares), model, shares=shares):
        assert same(state, alone)


def test_without_it_the_bits_depend_on_the_number_of_nodes():
    """The law above must be able to fail: sums on the wire, in float32, of two numbers of ranks."""
    model = build(Plain, torch.float32)
    batches = [rows(24, seed, torch.float32) for seed in range(3)]

    def work(link):
        rank = Rank(link, model, exchange="allreduce:dense")
        rank.train(batches)
        rank.exchange.close()
        return rank.state()

    assert not same(ranks.run(2, work)[0], ranks.run(3, work)[0])
    assert same(train(2, model, batches)[0][0], train(3, model, batches)[0][0])


def test_dropout_draws_the_same_whoever_computes():
    model = build(Conv)
    got = []
    for size in (1, 2, 4):
        torch.manual_seed(size)
        # ranks as threads draw from one generator, so they compute one after the other
        got.append(one_after_the_other(size, model))
    assert all(same(state, got[0]) for state in got)
    twice = Engine(SHARES, num_threads=1)
    twice.seed = 1
    assert not same(one_after_the_other(1, model, twice), got[0])


def one_after_the_other(size, model, engine=None):
    """Gradients of one step, share by share, as ``size`` nodes would compute them, added up as everyone does."""
    sums, buckets = [], ()
    for node in range(size):
        each = engine or Engine(SHARES, num_threads=1)
        rank = Rank(world(1)[0], model, exchange="ordered", engine=each)
        buckets = each.buckets
        assignment = Assignment(node, size, virtual=SHARES)
        each.begin_step(assignment, 4)
        mine = assignment.rows(24)
        gradients = []
        each.gradient(
            tuple(part[mine.start : mine.stop] for part in BATCHES[0]), 1 / 24, rank.exchange.forms(), gradients.append
        )
        sums.append({gradient.bucket.index: gradient.sums for gradient in gradients})
    whole = {}
    for bucket in buckets:
        have = {span: part for each in sums for span, part in each[bucket.index].items()}
        whole[str(bucket.index)] = add_up((0, SHARES), have)
    return whole


def test_what_the_user_draws_between_steps_goes_on_as_before():
    model = build(Conv)

    def work(link):
        torch.manual_seed(5)
        rank = Rank(link, model, exchange="ordered", engine=Engine(4, num_threads=1))
        rank.train(BATCHES[:1])
        return torch.randn(3)

    torch.manual_seed(5)
    want = torch.randn(3)
    assert torch.equal(ranks.run(1, work)[0], want)


@pytest.mark.parametrize("num_shares", range(1, 14))
def test_the_tree_is_added_up_alike_whoever_holds_what(num_shares):
    parts = [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(num_shares)]
    whole = (0, num_shares)
    want = add_up(whole, {(i, i + 1): part.clone() for i, part in enumerate(parts)})
    for size in range(1, num_shares + 2):
        have = {}
        for node in range(size):
            first, last = Assignment(node, size, virtual=num_shares).span
            mine = {(i, i + 1): parts[i].clone() for i in range(first, last)}
            if (all_of_it := add_up(whole, mine)) is not None:
                mine[whole] = all_of_it
            assert sorted(mine) == spans(whole, first, last)
            have.update(mine)
        assert torch.equal(add_up(whole, have), want)


def test_shares_are_dealt_whole():
    for count in (1, 5, 24, 100):
        cuts = {
            row
            for each in range(8)
            for row in (Assignment(each, 8).rows(count).start, Assignment(each, 8).rows(count).stop)
        }
        for size in (1, 2, 3, 5, 9):
            seats = [Assignment(node, size, virtual=8) for node in range(size)]
            assert [row for assignment in seats for row in assignment.rows(count)] == list(range(count))
            assert all(
                assignment.rows(count).start in cuts and assignment.rows(count).stop in cuts for assignment in seats
            )


def test_an_own_loop_is_refused():
    rank = Rank(world(1)[0], build(Plain), exchange="ordered", engine=Engine(4, num_threads=1))
    with pytest.raises(ValueError, match=r"use step\(batch\)"):
        rank.engine.collect_gradients(None, rank.exchange.forms(), print)


@pytest.mark.parametrize("given", ["reproducible:0", "reproducible:257", "reproducible:two"])
def test_a_number_of_shares_is_refused(given):
    with pytest.raises(ValueError, match="cuts a batch into 1 <= k <= 256 shares"):
        parse("engine", given)


@pytest.mark.dear
def test_one_and_two_nodes_over_gloo_have_the_same_bits(tmp_path):
    """By `join`, which takes the exchange that the engine needs; float32, as models are."""
    states = []
    for num_nodes in (1, 2):
        script = [str(HERE / "scripts" / "reproduced.py"), str(tmp_path / f"{num_nodes}.safetensors")]
        done = subprocess.run(
            [sys.executable, "-c", START, "threads:1", str(num_nodes), sys.executable, "-W", "error", *script],
            env={**os.environ, "PYTHONPATH": launching.python_path()},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        states.append(load_file(tmp_path / f"{num_nodes}.safetensors"))
    assert same(*states)


def test_the_plan_says_what_it_costs_and_chooses_it():
    measured = [
        Row("threads:2", measured_s=0.1),
        Row("reproducible:8", measured_s=0.15),
        Row("sequential", measured_s=0.2),
    ]
    chosen, reason, told = choose_requested(measured, "threads:2", "reproducible:8")
    assert chosen == "reproducible:8"
    assert reason.startswith("reproducible, as requested: 50% slower than threads:2; between N nodes")
    assert [row.reason for row in told] == ["faster, and not reproducible", "chosen", ""]


ROWS = """
import os, sys, time
from paceline.planner.measure.stopwatch import Stopwatch
if "PACELINE_PROFILE" in os.environ:
    sys.exit(0)
row, now_s = os.environ["PACELINE_ENGINE"], 0.0
time.perf_counter = lambda: now_s
watch = Stopwatch.of_environment(leader=True)
while watch:
    time.sleep(0.01)
    now_s += 0.03 if row.startswith("reproducible") else 0.02
    watch.tick(8, 0.1)
print("row", row)
"""


@pytest.mark.dear
def test_the_commands_say_what_it_costs_and_train_so(tmp_path):
    (tmp_path / "rows.py").write_text(ROWS)
    own = {**os.environ, "PYTHONPATH": launching.python_path(), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def paceline(*words):
        command = [sys.executable, "-m", "paceline", *words, "rows.py"]
        done = subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = json.loads(paceline("plan", "--reproducible", "--budget", "6", "--json"))
    assert told["chosen"] == "reproducible:8"
    assert "reproducible, as requested: 50% slower than " in told["reason"]
    assert paceline("run", "--reproducible") == "row reproducible:8\n"
