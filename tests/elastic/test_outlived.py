"""Real processes are killed: the survivors finish the training, sample by sample."""

import copy
import json
import re
import subprocess
import sys

import pytest
import torch
from outlived import BATCH, COUNT, EPOCHS, SEED, Samples

import ranks
from launching import HERE, environment
from nodes import OPTIMIZERS, Plain, Rank, build, gap, reference
from paceline.checkpoint import checkpoint
from paceline.cli.prepare import span
from paceline.data import sampler
from paceline.launch.local import num_processes
from paceline.report.record import read

pytestmark = pytest.mark.long
START = (
    "import sys; from paceline.launch import local;"
    "sys.exit(local.start(sys.argv[4:], sys.argv[1], int(sys.argv[2]), min_nodes=int(sys.argv[3])))"
)

CUT = "pipeline:2,micros=2,cut=head"
NUM_STEPS = EPOCHS * -(-COUNT // BATCH)


def launch(folder, *fates, engine="sequential", num_nodes=3, least=1, **more):
    script = [sys.executable, str(HERE / "scripts" / "outlived.py"), str(folder), *fates]
    command = [sys.executable, "-c", START, engine, str(num_nodes), str(least), *script]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=110, check=False)


def batches():
    source = Samples()
    turns = [sampler.permutation(SEED, epoch, COUNT) for epoch in range(EPOCHS)]
    return [
        (source.x[turn[at : at + BATCH]], source.y[turn[at : at + BATCH]])
        for turn in turns
        for at in range(0, COUNT, BATCH)
    ]


def undisturbed():
    return reference(build(Plain), batches(), OPTIMIZERS["momentum"])


def check(folder, done, survivors, num_losses):
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    names = sorted(path.stem for path in folder.glob("*-*.json"))
    assert names == sorted(survivors)
    said = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    states = [torch.load(folder / f"{name}.pt", weights_only=True) for name in names]
    want, want_losses = undisturbed()
    for each, state in zip(said, states, strict=True):
        assert each["losses"] == pytest.approx(want_losses, rel=1e-9)
        assert each["counted"] == pytest.approx(float(Samples().y.double().mean()), rel=1e-12)
        assert gap(state, want) < 1e-9
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())
    assert sum(each["leader"] for each in said) == 1
    events = read(folder)
    steps = [event for event in events if event["event"] == "step"]
    assert len([event for event in events if event["event"] == "regroup"]) == num_losses
    assert len([event for event in events if event["event"] == "redo"]) <= num_losses + 1  # one for the forms
    every = {event["step"]: event["weight"] for event in steps}
    lengths = [min(BATCH, COUNT - at) for at in range(0, COUNT, BATCH)] * EPOCHS
    assert [every[step] for step in sorted(every)] == lengths
    assert checkpoint.read_newest(folder).step == len(lengths)
    return said, events


@pytest.mark.dear
def test_the_leader_dies_and_then_another_and_the_last_one_ends_the_training(tmp_path):
    done = launch(tmp_path, "0:3:backward", "2:7:forward")
    said, events = check(tmp_path, done, ["1-0"], num_losses=2)
    assert said[0]["world"] == [0, 1]
    assert len(re.findall(r"paceline: \S+ failed at step", done.stderr)) == 2
    told = [event for event in events if event["event"] == "regroup"]
    assert [(event["step"], event["num_nodes"]) for event in told] == [(3, 2), (7, 1)]
    assert all(event["seconds"] < 30 for event in told)


@pytest.mark.dear
@pytest.mark.parametrize(("victim", "where"), [(0, "vote"), (2, "vote"), (0, "evaluate"), (1, "evaluate")])
def test_wherever_a_node_dies_the_others_end_the_training(tmp_path, victim, where):
    step = 5 if where == "vote" else NUM_STEPS
    survivors = [f"{node}-0" for node in range(3) if node != victim]
    check(tmp_path, launch(tmp_path, f"{victim}:{step}:{where}"), survivors, num_losses=1)


@pytest.mark.dear
def test_what_the_leader_died_in_writing_the_next_one_writes(tmp_path):
    check(tmp_path, launch(tmp_path, f"0:{NUM_STEPS}:save"), ["1-0", "2-0"], num_losses=1)


@pytest.mark.dear
@pytest.mark.parametrize(
    ("victim", "engine"),
    [(0, "processes:2"), (1, "processes:2"), (1, f"processes:2/{CUT}"), (1, CUT)],
)
def test_a_node_of_several_processes_or_stages_dies_as_one(tmp_path, victim, engine):
    done = launch(tmp_path, f"{victim}:4:forward", engine=engine, num_nodes=2)
    check(tmp_path, done, [f"{1 - victim}-{i}" for i in range(num_processes(engine))], num_losses=1)


@pytest.mark.dear
def test_sums_of_integers_are_those_of_all_nodes_and_then_of_the_survivors(tmp_path):
    """As over a link in memory, where three nodes train until the failure, and two from then on."""

    def train(link, begin, data, weights=None, optimizer=None):
        rank = Rank(link, build(Plain), exchange="allreduce:forms=dense", codec="qsgd")
        rank.exchange.step, rank.exchange.memory = begin, dict.fromkeys(rank.exchange.memory, SEED)
        if weights:
            rank.model.load_state_dict(weights)
            rank.optimizer.load_state_dict(copy.deepcopy(optimizer))
        rank.train(data)
        return rank.state(), rank.optimizer.state_dict()

    done = launch(tmp_path, "1:4:backward", "qsgd")
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_ = ranks.run(3, lambda link: train(link, 0, batches()[:4]))
    (want, _), _ = ranks.run(2, lambda link: train(link, 4, batches()[4:], *first))
    assert gap(want, undisturbed()[0]) > 1e-3, "nothing was rounded"
    one, other = (torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("*-0.pt")))
    assert gap(one, want) < 1e-9
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.dear
def test_where_nobody_is_to_outlive_a_loss_in_an_evaluation_says_who_was_doing_what(tmp_path):
    done = launch(tmp_path, f"1:{NUM_STEPS}:evaluate", num_nodes=2, least=0)
    assert done.returncode != 0
    assert re.search(r"rank 0 of 2 on .+, evaluating at step \d+: lost rank 1", done.stderr), done.stderr


@pytest.mark.dear
def test_batch_norm_over_everyone_outlives_two_nodes_of_two_processes(tmp_path):
    """Both fail in the middle of a step, while batch statistics are summed; the result is that of one process."""
    alone, nodes = tmp_path / "alone", tmp_path / "nodes"
    for folder, fates, how in (
        (alone, (), {"num_nodes": 1, "least": 0}),
        (nodes, ("1:4:forward", "0:7:backward"), {"engine": "processes:2"}),
    ):
        folder.mkdir()
        done = launch(folder, *fates, "sync", **how)
        assert done.returncode == 0, done.stderr
    (want,) = (torch.load(path, weights_only=True) for path in alone.glob("*.pt"))
    losses = json.loads((alone / "0-0.json").read_text())["losses"]
    for local_rank in range(2):
        assert gap(torch.load(nodes / f"2-{local_rank}.pt", weights_only=True), want) < 1e-9
        assert json.loads((nodes / f"2-{local_rank}.json").read_text())["losses"] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(
    ("nodes", "hosts", "said"),
    [("2:4", None, (2, 4)), ("3", None, (3, 3)), (None, "a,b", (0, 2)), (None, None, (0, 1)), ("1:3", "a,b", (1, 2))],
)
def test_how_many_nodes_a_run_may_have(nodes, hosts, said):
    assert span(nodes, hosts) == said


@pytest.mark.parametrize(("nodes", "hosts"), [("4:2", None), ("0:2", None), ("2:x", None), ("a", None), ("3:4", "a,b")])
def test_a_range_that_is_none_is_told(nodes, hosts):
    with pytest.raises(ValueError, match=f"--nodes.*{nodes}"):
        span(nodes, hosts)
