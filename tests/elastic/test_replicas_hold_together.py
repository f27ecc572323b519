"""Replica divergence is detected, ended and bounded, at the documented cost in bytes."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch

import ranks
from launching import HERE, environment, launch
from needs import want
from nodes import OPTIMIZERS, Rank, Whole, build, gap, rows
from paceline.engine.compute.state_store import in_parts
from paceline.engine.sequential import Engine
from paceline.environment import LaunchEnvironment
from paceline.link.net.metered import MeteredLink
from paceline.report.page.run import load
from paceline.report.page.summary import facts
from paceline.report.record import Record, read
from paceline.step.replica_sync import ReplicaSync

pytestmark = pytest.mark.long

PERIOD, QUIET = 5, 24
BATCHES = [rows(24, seed) for seed in range(4)]


@pytest.mark.parametrize("numels", [[7], [3, 0, 10, 1], [1] * 9, []])
@pytest.mark.parametrize("each", [1, 4, 100])
def test_parts_hold_every_value_once(numels, each):
    parts = in_parts(numels, each)
    every = [(index, i) for part in parts for index, start, stop in part for i in range(start, stop)]
    assert every == [(index, i) for index, numel in enumerate(numels) for i in range(numel)]
    assert all(sum(stop - start for _, start, stop in part) == each for part in parts[:-1])
    whole = in_parts(numels, each, whole=True)
    assert [one for part in whole for one in part] == [(i, 0, n) for i, n in enumerate(numels) if n]
    assert all(sum(stop for *_, stop in part) >= each for part in whole[:-1])


class Careless(Engine):
    """Its arithmetic is off by ``error`` in every update, as another processor's may be by the last bit."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    @torch.no_grad()
    def apply(self, update):
        applied = super().apply(update)
        if update.gradients:
            torch._foreach_mul_(list(self.weights), 1 + self.error)
        return applied


def together(link, folder, optimizer="sgd", period=PERIOD, error=0.0):
    record, engine = Record(folder / str(link.rank)), Careless(error * link.rank)
    rank = Rank(MeteredLink(link), build(), OPTIMIZERS[optimizer], engine=engine, record=record)
    rank.drift = ReplicaSync(rank.run, period or PERIOD, QUIET, min_values=1)
    if period:
        rank.run.observers.insert(1, rank.drift)
    return rank


def train(rank, num_steps):
    """The weights after each step."""
    states = []
    for i in range(num_steps):
        rank.step(Whole(BATCHES[i % len(BATCHES)]))
        states.append(rank.state())
    return states


def remembered(rank):
    """The optimizer's state."""
    return [
        value
        for parameter in rank.model.parameters()
        for _, value in sorted(rank.optimizer.state[parameter].items())
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_like_hardware_a_difference_is_gone_after_a_period(optimizer, tmp_path, capsys):
    """One weight, and the optimizer state of another; also where an update depends on a whole tensor."""

    def work(link):
        rank = together(link, tmp_path, optimizer)
        train(rank, 2)
        if link.rank == 1:
            with torch.no_grad():
                rank.model.second.bias[3] += 1e-9
                for value in rank.optimizer.state[rank.model.first.weight].values():
                    if isinstance(value, torch.Tensor) and value.dim():
                        value[5, 7] *= 1 + 1e-9
        train(rank, 8 + PERIOD)  # every value has been looked at after 8 steps
        states, kept = rank.state(), [value.clone() for value in remembered(rank)]
        train(rank, QUIET + 2)
        assert not rank.drift._steps_left
        return states, kept

    (one, kept_one), (other, kept_other), _ = ranks.run(3, work)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(a, b) for a, b in zip(kept_one, kept_other, strict=True))
    events = [event for event in read(tmp_path / "0") if event["event"] == "drift"]
    assert "gap" not in events[0]
    assert events[0]["step"] >= 2
    assert events[-1]["over"]
    assert 0 < max(event.get("gap", 0.0) for event in events) < 1e-6
    steps = [event for event in read(tmp_path / "0") if event["event"] == "step"]
    assert any(event["drift"] for event in steps)
    assert not any(event["drift"] for event in steps[-QUIET:])
    said = capsys.readouterr().err
    assert said.count(f"the nodes' weights differ since step {events[0]['step']}") == 1
    run = load(tmp_path / "0")
    assert "weights differ" in run.hints[0]
    assert "apart" in facts(run)["re-broadcast"]


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 1), ("momentum", 2), ("adamw", 3)])
def test_bytes_are_the_cost_of_broadcasts(optimizer, copies, tmp_path):
    """Of the weights and their optimizer state; the memory link's broadcast sends (N - 1) n bytes."""
    size = 3

    def work(link):
        rank = together(link, tmp_path, optimizer, error=1e-12)
        train(rank, 30)
        return sum(weight.nbytes for weight in rank.engine.weights)

    num_bytes = ranks.run(size, work)[0]
    counters = 0 if optimizer != "adamw" else 4 * 6  # each parameter's number of steps
    events = [event for event in read(tmp_path / "0") if event["event"] in ("step", "drift")]
    periods = [event for event in events if "gap" in event]
    assert len(periods) >= 4
    assert {event["sent_bytes"] for event in periods} == {(size - 1) * (copies * num_bytes + counters)}
    begin = next(event["step"] for event in events if event["event"] == "drift")
    sent = [event["sent_bytes"] for event in events if event["event"] == "step"]
    ends = {event["step"] for event in periods}
    plain = sent[begin - 1]
    for first, last in pairwise(sorted(ends)):
        extra = [sent[step] - plain for step in range(first + 1, last + 1)]
        told = size - 1, 64  # at the end of a period everyone says how far apart it was
        assert 0 <= sum(extra) - periods[0]["sent_bytes"] <= told[0] * told[1]


def test_with_other_arithmetic_the_period_bounds_the_distance(tmp_path):
    """Each step takes rank 1 further away by 1e-9 of its weights; gradients are the same for both."""
    error, num_steps = 1e-9, 60

    def work(link, period):
        rank = together(link, tmp_path / str(period), period=period, error=error)
        return train(rank, num_steps)

    apart = {}
    for period in (0, PERIOD):
        one, other = ranks.run(2, lambda link, period=period: work(link, period))
        apart[period] = [gap(a, b) for a, b in zip(one, other, strict=True)]
    assert apart[0][-1] > 0.5 * num_steps * error, "nothing drifts, so nothing is bounded"
    held = apart[PERIOD][2 * PERIOD + 8 :]
    assert max(held) <= 1.1 * PERIOD * error
    assert min(held) > 0
    told = [
        event["gap"] for event in read(tmp_path / str(PERIOD) / "0") if event["event"] == "drift" and "gap" in event
    ]
    assert len(told) > 5
    assert max(told[1:]) <= 1.1 * (PERIOD + 1) * error


def test_nothing_goes_round_while_replicas_are_equal(tmp_path):
    def work(link):
        rank = together(link, tmp_path, "momentum")
        train(rank, 12)

    ranks.run(2, work)
    events = read(tmp_path / "0")
    assert {event["event"] for event in events} == {"step", "forms"}
    assert len({event["sent_bytes"] for event in events[2:] if event["event"] == "step"}) == 1


@pytest.mark.dear
def test_nodes_of_several_processes_come_together(tmp_path):
    launch("mixed.py", tmp_path, "planted", engine="processes:2", num_nodes=2)
    one, other = (torch.load(tmp_path / f"{node}.pt", weights_only=True) for node in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    events = [event for event in read(tmp_path / "run") if event["event"] == "drift"]
    assert events[0]["step"] >= 3
    assert max(event.get("gap", 0.0) for event in events) > 0


def test_weights_alone_go_round_where_a_node_has_several_processes(tmp_path):
    """Whatever their memory layout: the same values are sent, and written to the same place."""

    def work(link):
        rank = together(link, tmp_path, "momentum")
        train(rank, 1)
        drift, weight = rank.drift, rank.engine.weights[0]
        rank.run.world = LaunchEnvironment(node=link.rank, num_nodes=2, local_sizes=(1, 2))
        if link.rank:
            turned = weight.new_empty_strided(weight.shape, (1, len(weight)))
            rank.engine.backward.parameters[rank.engine.names[0]].data = turned.copy_(weight + 1)
            assert not turned.is_contiguous()
        drift._begin(0)
        before = rank.run.link.sent_bytes
        for part in drift.parts:
            drift._broadcast(part)
        assert (drift._divergence > 0.1) == (link.rank == 1)
        return rank.engine.weights, rank.run.link.sent_bytes - before

    (one, num_bytes), (other, _) = ranks.run(2, work)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert num_bytes == sum(weight.nbytes for weight in one)


@pytest.mark.dear
def test_a_node_of_one_process_and_one_of_two_come_together(tmp_path):
    """Story: one node sent weights and optimizer state, the other weights alone, in one broadcast."""
    start = "import sys; from paceline.launch import local; sys.exit(local.start(sys.argv[1:], '', 2, sizes=(1, 2)))"
    script = [sys.executable, "-W", "error", str(HERE / "scripts" / "mixed.py"), str(tmp_path), "planted"]
    command = [sys.executable, "-c", start, *script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    one, other = (torch.load(tmp_path / f"{node}.pt", weights_only=True) for node in range(2))
    assert gap(one, other) < 1e-6
    events = [event for event in read(tmp_path / "run") if event["event"] == "drift"]
    assert max(event.get("gap", 0.0) for event in events) > 1e-6


@pytest.mark.dear
@pytest.mark.parametrize("what", ["instructions", "threads"])
def test_nodes_that_compute_differently_are_held_together(what, tmp_path):
    """By other processor instructions, or by another number of threads: sums are divided differently."""
    if what == "instructions" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        want(processor="this one has no instructions that could be held back")
    done = launch("mixed.py", tmp_path, what, engine="", num_nodes=2)
    one, other = (torch.load(tmp_path / f"{node}.pt", weights_only=True) for node in range(2))
    found = [event for event in read(tmp_path / "run") if event["event"] == "drift"]
    periods = [event for event in found if "gap" in event]
    assert gap(one, other) < 1e-5
    assert 0 < max(event["gap"] for event in periods) < 1e-5
    # the weights and their momentum, which rank 0 sends to one other
    assert {event["sent_bytes"] for event in periods} == {2 * sum(weight.nbytes for weight in one.values())}
    assert done.stderr.count("the nodes' weights differ since step") == 1
