"""Local SGD: the steps that a node took since the last average are lost with its failure, and their samples are
assigned again."""

import collections
import copy
import json

import pytest
import torch
from outlived import EPOCHS, Samples
from test_outlived import launch
from test_survive import Fate, Killed, Mortals
from torch.nn import functional as F

import ranks
from nodes import OPTIMIZERS, Rank, build, gap, rows
from paceline.checkpoint import checkpoint
from paceline.data.batches import batches
from paceline.data.sampler import Assignment
from paceline.elastic.fault_tolerant import FaultTolerantControl
from paceline.engine.sequential import Engine
from paceline.exchange.flow.control import Control
from paceline.launch.signals import RESUME_CODE
from paceline.messages import Decision, StepOutcome, Vote
from paceline.registry import parse
from paceline.report.record import read
from paceline.step.redistribution import Redistribution
from paceline.transport import ViewChange

BATCH, PERIOD, VICTIM = 24, 2, 1
DATA = [rows(BATCH, seed) for seed in range(4)]


def train(fate, name):
    """Per rank its weights and the number of view changes; None for ranks that failed."""

    def work(link):
        engine, exchange, members = Engine(), parse("exchange", name), Mortals(link, fate)
        control = FaultTolerantControl(Control(members, votes=False), [exchange.rebuild, engine.reopen])
        rank = Rank(
            members.link, build(), OPTIMIZERS["sgd"], exchange=exchange, members=members, control=control, engine=engine
        )

        def regrouped(news):
            mine = rank.run.assignment
            rank.run.assignment = Assignment(news.previous_ranks.index(mine.node), len(news.previous_ranks))

        control.on_view_change = regrouped
        fate.counts.pop((0, link.rank), None)  # from here on operations count
        try:
            rank.train(DATA)
            return rank.state(), control.num_view_changes
        except Killed:
            return None

    return ranks.run(3, work)


def alone(lost_after, kept):
    """The weights of local SGD where VICTIM fails after so many steps, in an average that includes it or not."""
    models = [build() for _ in range(3)]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    left, samples = [0, 1, 2], collections.Counter()
    for number, (x, y) in enumerate(DATA, 1):
        for place, node in enumerate(left):
            span = Assignment(place, len(left)).rows(BATCH)
            optimizers[node].zero_grad()
            F.cross_entropy(models[node](x[span.start : span.stop]), y[span.start : span.stop]).backward()
            optimizers[node].step()
            samples[node] += len(span)
        if number % PERIOD == 0:
            inside = [node for node in left if number != lost_after or kept or node != VICTIM]
            whole = sum(samples[node] for node in inside)
            states = [models[node].state_dict() for node in inside]
            mean = {
                name: sum(state[name] * (samples[node] / whole) for node, state in zip(inside, states, strict=True))
                for name in states[0]
            }
            if number == lost_after:
                left = [node for node in left if node != VICTIM]
            for node in left:
                models[node].load_state_dict(copy.deepcopy(mean))
            samples.clear()
    return models[0].state_dict()


@pytest.mark.parametrize("name", [f"local_sgd:{PERIOD}", f"diloco:{PERIOD},lr=1,beta=0"])
@pytest.mark.parametrize("after", [False, True])
def test_whoever_dies_in_whichever_operation_of_an_average_the_others_have_the_same_one(name, after):
    """An average of `Plain` has eight sums, messages before, a vote after: a rank fails at each of these operations."""
    seen = set()
    for number in range(1, 20):
        fate = Fate((0, VICTIM, number), after=after)
        results = train(fate, name)
        if not fate.fired:
            break
        left = [result for result in results if result]
        assert len(left) == 2
        states = [state for state, _ in left]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        histories = {(step, kept): alone(step, kept) for step in (2, 4) for kept in (False, True)}
        fitting = [which for which, want in histories.items() if gap(states[0], want) < 1e-12]
        assert len(fitting) == 1, number
        seen.update(fitting)
    assert {(2, False), (4, False)} <= seen


def test_what_is_dealt_again_is_what_the_lost_node_had_since_the_last_average():
    (run,) = ranks.run(1, lambda link: Rank(link, build()).run)
    run.assignment = Assignment(0, 3)
    redistribution, made = Redistribution(run), []
    for number, batch in enumerate(batches(Samples(), BATCH, 2, 0, lambda: run.assignment, again=run.cursor.again)):
        redistribution.takes(batch, own=False)
        redistribution.votes(Vote())
        made.append(batch)
        if number == 1:
            redistribution.averaged()
        if number == 3:
            redistribution.on_view_change(ViewChange(1, (0, 2), (12, 12), ("gone",), 0.1, "lost"))
            run.assignment = Assignment(0, 2)
    lost = [index for step in (2, 3) for index in made[step].indices_of(Assignment(1, 3))]
    assert made[6].indices.tolist() == lost
    assert [(batch.epoch, batch.ends_epoch) for batch in made[4:8]] == [(0, False), (0, True), (0, True), (1, False)]
    assert len(made) == 13
    assert run.cursor.again == []


def test_a_step_that_is_computed_again_is_dealt_again_once_and_one_node_remembers_nothing():
    (run,) = ranks.run(1, lambda link: Rank(link, build()).run)
    run.assignment = Assignment(0, 2)
    redistribution, lost = Redistribution(run), ViewChange(1, (0,), (24,), ("gone",), 0.1, "lost")
    made = list(batches(Samples(), BATCH, 1, 0, lambda: run.assignment))
    redistribution.takes(made[0], own=False)
    redistribution.votes(Vote())
    redistribution.again(0, StepOutcome(Decision.RETRY))
    redistribution.votes(Vote())
    redistribution.on_view_change(lost)
    assert run.cursor.again == made[0].indices_of(Assignment(1, 2))
    run.assignment = Assignment(0, 1)
    redistribution.takes(made[1], own=False)
    redistribution.votes(Vote())
    assert redistribution._used == []


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_are_dealt_again_are_as_random_as_whoever_reads_them(workers):
    """With reader processes, a sample's random numbers depend on the seed, the epoch and its number."""

    class Noisy(Samples):
        def __getitem__(self, i):
            return self.x[i] + torch.randn(()), self.y[i]

    def extra(state):
        torch.manual_seed(state)
        again = [5, 7]
        *_, last = batches(Noisy(), BATCH, 1, 0, Assignment(), workers=workers, ahead=0, again=again)
        return last.indices.tolist(), last.share(Assignment())[0]

    (one, first), (other, second) = extra(1), extra(2)
    assert one == other == [5, 7]
    assert torch.equal(first, second) == bool(workers)


@pytest.mark.dear
def test_below_the_minimum_all_is_kept_for_a_resume(tmp_path):
    done = launch(tmp_path, "1:9:forward", "periods", least=3)
    assert done.returncode, done.stdout + done.stderr
    assert f"exit code {RESUME_CODE}: resume the run from its newest checkpoint" in done.stderr
    assert "may come back" not in done.stderr
    assert "its exchange does not synchronise on every step, so it admits no joining node; saved" in done.stderr
    assert checkpoint.read_newest(tmp_path).state["again"]


@pytest.mark.dear("processes", "diloco")
@pytest.mark.parametrize(
    ("engine", "num_nodes", "step", "how"),
    [
        ("sequential", 3, 7, "periods"),
        ("sequential", 3, EPOCHS * 6 - 2, "periods"),
        ("processes:2", 2, 7, "periods"),
        ("sequential", 3, 7, "diloco"),
    ],
    ids=["middle", "end", "processes", "diloco"],
)
def test_every_sample_is_in_the_weights_as_often_as_there_are_epochs(tmp_path, engine, num_nodes, step, how):
    done = launch(tmp_path, f"1:{step}:forward", how, engine=engine, num_nodes=num_nodes)
    assert done.returncode == 0, done.stdout + done.stderr
    averaged = max(number for number in range(step + 1) if number % 4 == 0 or number % 6 == 0)  # or an epoch's end
    used = collections.Counter()
    for path in tmp_path.glob("used-*.jsonl"):
        of_lost = path.stem.startswith("used-1-")
        for number, values in map(json.loads, path.read_text().splitlines()):
            if not of_lost or number < averaged:
                used.update(values)
    assert used == collections.Counter(Samples().x[:, 0].tolist() * EPOCHS)
    states = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("*-*.pt"))]
    assert len(states) == (num_nodes - 1) * (2 if "processes" in engine else 1)
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in state)
    assert [event["event"] for event in read(tmp_path)].count("regroup") == 1
    assert checkpoint.read_newest(tmp_path)
