"""All processes resume from one checkpoint: the newest that each can read completely, or that is sent to it."""

from __future__ import annotations

import random
import shutil

import pytest
import torch

import ranks
from paceline.checkpoint import transfer
from paceline.checkpoint.agree import agree
from paceline.checkpoint.checkpoint import WEIGHTS, CheckpointError, read, read_newest, write
from paceline.checkpoint.transfer import CheckpointTransfer
from paceline.exchange.flow.control import Control
from paceline.link.memory import Members


def gathering(link):
    return Control(Members(link)).all_gather


def choose(*runs):
    """The checkpoint from which all resume; each rank reads its own one of the given folders."""

    def work(link):
        return agree(lambda most: read_newest(runs[link.rank], most), gathering(link), "runs/mine")

    choices = ranks.run(len(runs), work)
    if choices[0] is None:
        assert choices == [None] * len(runs)
        return None
    assert len({(choice.lacking, choice.skipped) for choice in choices}) == 1
    kept = {rank: choice.found for rank, choice in enumerate(choices) if rank not in choice.lacking}
    assert len({(one.step, one.seal) for one in kept.values()}) == 1
    assert all(one.path.parent == runs[rank] for rank, one in kept.items())
    return choices[0]


def make(run, *steps, value=0.0):
    for step in steps:
        write(run, step, {"w": torch.full((5,), value)}, {"step": step}, keep=100)
    return run


def tear(run, step):
    path = run / f"checkpoint-{step:08d}" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])


def test_where_all_see_the_same_it_is_the_newest(tmp_path):
    runs = [make(tmp_path / name, 1, 2, 3) for name in "abc"]
    found = choose(*runs)
    assert (found.found.step, found.skipped) == (3, ())
    assert choose(runs[0]).found.step == 3


def test_one_that_is_torn_on_one_node_is_passed_over_by_all(tmp_path):
    runs = [make(tmp_path / name, 1, 2, 3) for name in "abc"]
    tear(runs[1], 3)
    found = choose(*runs)
    assert found.found.step == 2
    (reason,) = found.skipped
    assert "b/checkpoint-00000003/weights.safetensors is damaged: " in reason


def test_one_that_a_node_does_not_see_is_passed_over_by_all(tmp_path):
    found = choose(make(tmp_path / "a", 1, 2, 3), make(tmp_path / "b", 1, 2), make(tmp_path / "c", 1, 2, 3))
    assert (found.found.step, found.skipped) == (2, ("step 3, which rank 1 does not see",))


def test_they_look_for_one_until_they_have_it(tmp_path):
    found = choose(make(tmp_path / "a", 1, 2, 5), make(tmp_path / "b", 1, 3, 4), make(tmp_path / "c", 1, 2, 3))
    assert found.found.step == 1


def test_different_ones_of_one_step_are_not_the_same(tmp_path):
    runs = make(tmp_path / "a", 1), make(tmp_path / "b", 1)
    make(runs[0], 2, value=1.0), make(runs[1], 2, value=2.0)
    found = choose(*runs)
    assert (found.found.step, found.skipped) == (1, ("step 2, of which ranks see different checkpoints",))


def test_none_at_all_is_none(tmp_path):
    assert choose(tmp_path / "a", tmp_path / "b") is None


@pytest.mark.parametrize(("one", "other", "steps"), [((), (1, 2), r"\[None, 2\]"), ((2,), (1,), r"\[2, 1\]")])
def test_none_in_common_is_told(tmp_path, one, other, steps):
    with pytest.raises(
        ValueError, match=f"found different checkpoints in runs/mine, of steps {steps}.* none in common"
    ):
        choose(make(tmp_path / "a", *one), make(tmp_path / "b", *other))


def test_a_node_on_which_all_are_damaged_is_told_by_name(tmp_path):
    runs = [make(tmp_path / name, 1) for name in "ab"]
    tear(runs[1], 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*b is complete"):
        choose(*runs)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_newest_of_those_that_all_have_whole(tmp_path, seed):
    dice = random.Random(seed)
    runs, common = [], set(range(6))
    for name in "abc"[: dice.choice((2, 3))]:
        steps = sorted(dice.sample(range(6), dice.randrange(2, 7)))
        torn = set(dice.sample(steps, dice.randrange(len(steps))))
        runs.append(make(tmp_path / name, *steps))
        for step in torn:
            tear(runs[-1], step)
        common &= set(steps) - torn
    if common:
        assert choose(*runs).found.step == max(common)
    else:
        with pytest.raises((ValueError, CheckpointError)):
            choose(*runs)


def test_who_sees_none_has_no_say(tmp_path):
    found = choose(make(tmp_path / "a", 1, 2, 3), tmp_path / "b", make(tmp_path / "c", 1, 2), tmp_path / "d")
    assert (found.found.step, found.lacking) == (2, (1, 3))


# Sending.

NODES = 0, 0, 1, 1, 2


def deliver(run, lacking=(2, 3, 4)):
    """The checkpoints of five processes on three nodes after the transfer; only rank 0's node has it before."""

    def work(link):
        kept = None if link.rank in lacking else read(run)
        return CheckpointTransfer(link.rank, NODES, gathering(link)).send(kept, lacking)

    return ranks.run(len(NODES), work)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A checkpoint that is sent in several parts; afterwards no temporary file may remain."""
    monkeypatch.setattr(transfer, "PART_BYTES", 1000)
    places = tmp_path / "places"
    places.mkdir()
    monkeypatch.setattr(transfer.tempfile, "tempdir", str(places))
    yield write(tmp_path, 7, {"w": torch.arange(1234.0)}, {"moments": [torch.randn(777)], "facts": {"a": 1}})
    assert list(places.iterdir()) == []


@pytest.mark.parametrize("lacking", [(2, 3, 4), (3,), (1, 4)])
def test_who_lacks_it_has_it_then(run, lacking):
    first, *others = deliver(run, lacking)
    assert torch.equal(first.weights["w"], torch.arange(1234.0))
    for other in others:
        assert (other.step, other.seal, other.facts) == (first.step, first.seal, first.facts)
        assert torch.equal(other.weights["w"], first.weights["w"])
        assert torch.equal(other.state["moments"][0], first.state["moments"][0])


def test_what_changes_on_the_way_is_refused_everywhere(run, monkeypatch):
    append = transfer._append
    monkeypatch.setattr(transfer, "_append", lambda path, part: append(path, part.replace(b"\0", b"\1", 1)))
    with pytest.raises(CheckpointError, match=r"rank 2 .* its transfer failed: .*weights\.safetensors is damaged"):
        deliver(run)


def test_a_node_without_room_is_told_everywhere(run, monkeypatch):
    shutil.rmtree(run.parent / "places")
    with pytest.raises(CheckpointError, match=r"rank 2 .* its transfer failed: .*No such file.*TMPDIR"):
        deliver(run)
    (run.parent / "places").mkdir()
