"""Real processes on a real link: a slow node gets fewer rows, every sample counts once, and nothing else changes."""

import itertools
import json

import pytest
import torch
from shares import BATCH, COUNT, EPOCHS, Samples, entropy, several

import ranks
from launching import launch
from nodes import OPTIMIZERS, Plain, Rank, build, gap, reference, rows
from paceline.data import sampler
from paceline.launch.local import free_port
from paceline.registry import find
from paceline.report.record import read

pytestmark = pytest.mark.long

RUNS = {"sequential": ("step", "own", "empty"), "processes:2": ("step", "empty")}
CASES = [(engine, loop) for engine, loops in RUNS.items() for loop in loops if loop != "empty"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of each engine's trainings."""
    folders = {engine: tmp_path_factory.mktemp("ran") for engine in RUNS}
    for engine, loops in RUNS.items():
        launch("shares.py", folders[engine], *loops, engine=engine, num_nodes=2)
    return folders


def said(folder, loop):
    paths = sorted(folder.glob(f"{loop}-*.json"))
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.dear
@pytest.mark.parametrize(("engine", "loop"), CASES)
def test_a_slow_node_gives_rows_away_and_gets_some_back(ran, engine, loop):
    one, *others = said(ran[engine], loop)
    assert all(each["shares"] == one["shares"] and each["losses"] == one["losses"] for each in others)
    shares = [(12, 12), *map(tuple, one["shares"])]
    first = next(at for at, now in enumerate(shares) if now[1] < 12)
    assert first < 60
    assert shares[first][1] < 11, "the slow node has not given rows away"
    assert shares[-1][1] > shares[first][1], "it has not got any back"
    changes = [now for before, now in itertools.pairwise(shares) if now != before]
    named = [event for event in read(ran[engine] / loop) if event["event"] == "straggler"]
    assert any(event.get("node") == 1 for event in named)
    told = [event for event in read(ran[engine] / loop) if event["event"] == "shares"]
    assert [tuple(event["new"]) for event in told] == changes
    # kept, equal when another training begins, and again as kept
    assert one["kept"] == [list(shares[-1]), [12, 12], list(shares[-1])]
    assert all(each["kept"] == one["kept"] for each in others)


@pytest.mark.dear
@pytest.mark.parametrize(("engine", "loop"), CASES)
def test_every_sample_counts_once_and_the_training_is_that_of_one_process(ran, engine, loop):
    everyone, source = said(ran[engine], loop), Samples()
    turns = [sampler.permutation(3, epoch, COUNT) for epoch in range(EPOCHS)]
    expected = [turn[at : at + BATCH].tolist() for turn in turns for at in range(0, COUNT, BATCH)]
    expected = expected[: len(everyone[0]["losses"])]
    dealt = zip(*(each["mine"] for each in everyone), strict=True)
    assert [list(itertools.chain.from_iterable(parts)) for parts in dealt] == expected
    data = [(source.x[turn], torch.tensor(turn)) for turn in expected]
    want, want_losses = reference(build(Plain), data, OPTIMIZERS["sgd"], loss=entropy)
    assert everyone[0]["losses"] == pytest.approx(want_losses, rel=1e-9)
    for place, each in enumerate(everyone):
        assert gap(torch.load(ran[engine] / f"{loop}-{place}.pt", weights_only=True), want) < 1e-9
        assert each["right"] == pytest.approx((COUNT - 1) / 2, rel=1e-12)


@pytest.mark.dear
@pytest.mark.parametrize("engine", RUNS)
def test_a_node_without_rows_agrees_on_a_loss_of_parts_that_it_has_never_seen(ran, engine):
    source, model = Samples(), build(Plain)
    data = [(source.x[at : at + BATCH], torch.arange(at, min(at + BATCH, COUNT))) for at in range(0, COUNT, BATCH)]
    _, losses = reference(model, data, OPTIMIZERS["sgd"], loss=lambda *rows: sum(several(*rows).values()))
    for each in said(ran[engine], "empty"):
        assert each["losses"] == pytest.approx(losses, rel=1e-10)
    assert set(said(ran[engine], "empty")[0]["terms"]) == {"entropy", "size"}


@pytest.mark.parametrize("kind", ["gloo", "tls"])
def test_five_ranks_of_unlike_shares_train_as_one(kind, monkeypatch):
    """The first has no rows, the last two fifths of them. Ranks are threads here, on sockets of their own."""
    monkeypatch.setenv("PACELINE_SECRET", "of this test")
    port, batches = free_port(), [rows(BATCH, seed) for seed in range(5)]

    def work(assignment):
        link = find("link", kind, assignment.rank, assignment.size, "127.0.0.1", port)
        rank = Rank(link, build(), shares=(0.0, 1.0, 2.0, 3.0, 4.0))
        losses = rank.train(batches)
        link.close()
        return losses, rank.state()

    (losses, first), *others = ranks.run(5, work)
    for said, weights in others:
        assert said == losses
        assert all(torch.equal(weights[name], first[name]) for name in first)
    want, expected = reference(build(), batches)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert gap(first, want) < 1e-12
