"""The state of a run in parts: each row goes once, with what the optimizer keeps of it, and comes bit by bit."""

import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.elastic import state_transfer
from paceline.elastic.catch_up import CatchUp
from paceline.report.step_observer import StepObserver

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def trained(kind, steps, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    pace = paceline.join(
        model, OPTIMIZERS[kind](model.parameters()), F.cross_entropy, batch_size=8, engine="sequential"
    )
    dice = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        pace.step((torch.randn(8, 40, generator=dice), torch.randint(0, 3, (8,), generator=dice)))
    return pace


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_all_parts_are_the_whole(kind, steps, monkeypatch):
    monkeypatch.setattr(state_transfer, "PART_BYTES", 4096)
    with trained(kind, 3, seed=1) as leader, trained(kind, steps, seed=2) as joiner:
        parts = state_transfer.parts(leader.run)
        rows = Counter((name, row) for part in parts for name, start, stop in part for row in range(start, stop))
        cut = {name for part in parts for name, _, stop in part if stop}
        assert bool(cut) == (kind != "adafactor"), "rows of its weights do not stand alone"
        weights = leader.engine.state()
        assert all(rows[name, row] == 1 for name in cut for row in range(len(weights[name])))
        assert sum(rows.values()) == sum(len(weights[name]) for name in cut)
        assert sorted(name for part in parts for name, _, stop in part if not stop) == sorted(weights.keys() - cut)
        assert len(parts) > 1
        for part in parts:
            message = state_transfer.Message(state_transfer.state_part(leader.run, part))
            assert kind == "adafactor" or message.num_bytes < 3 * state_transfer.PART_BYTES
            state_transfer.take_part(
                joiner, state_transfer.read(bytearray(b"".join(bytes(each) for each in message.parts())))
            )
        assert all(torch.equal(value, joiner.engine.state()[name]) for name, value in weights.items())
        theirs, mine = (each.engine.optimizer_state()["state"] for each in (leader, joiner))
        assert theirs.keys() == mine.keys()
        for number, state in theirs.items():
            assert state.keys() == mine[number].keys()
            for key, value in state.items():
                same = (
                    torch.equal(value, mine[number][key])
                    if isinstance(value, torch.Tensor)
                    else value == mine[number][key]
                )
                assert same, (number, key)


class Told(StepObserver):
    """Gives each step to who follows."""

    def __init__(self, following):
        self.following = following

    def applies(self, outcome, rule):
        return self.following.before(outcome, rule)


class Slow:
    """Takes nothing before it is told to."""

    def __init__(self):
        self.go, self.taken = threading.Event(), []

    def line(self, name):
        return self

    def set_deadline_mode(self):
        pass

    def send(self, parts, num_bytes):
        assert self.go.wait(30.0)
        self.taken.append(bytearray(b"".join(bytes(part) for part in parts)))


def followed(leader):
    """Who follows from a moment on, and who it is sent by."""
    slow = Slow()
    following = CatchUp(leader.run, slow, "late")
    following._maker.join(30.0)
    return following, slow


def step(pace, seed):
    dice = torch.Generator().manual_seed(seed)
    return pace.step((torch.randn(8, 40, generator=dice), torch.randint(0, 3, (8,), generator=dice)))


def test_a_part_is_of_the_moment_in_which_it_was_copied(monkeypatch):
    """Also where the optimizer had no state yet when places were made for it."""
    monkeypatch.setattr(state_transfer, "PART_BYTES", 4096)
    with trained("momentum", 0, seed=1) as leader:
        following, slow = followed(leader)
        step(leader, 1)
        want = state_transfer.state_part(leader.run, following.next)
        want = state_transfer.read(bytearray(b"".join(bytes(each) for each in state_transfer.Message(want).parts())))
        following.part(state_transfer.state_part(leader.run, following.next))
        step(leader, 2)
        slow.go.set()
        following.end(True)
        found = state_transfer.read(slow.taken[0])
        assert found["states"].keys() == want["states"].keys() != set()
        for name, state in want["states"].items():
            assert torch.equal(found["states"][name]["momentum_buffer"], state["momentum_buffer"])
        assert all(torch.equal(found["part"][name], value) for name, value in want["part"].items())


def test_what_waits_to_be_sent_is_bounded(monkeypatch):
    """On a wire that is slower than the steps, long before all parts have gone."""
    monkeypatch.setattr(state_transfer, "PART_BYTES", 512)
    with trained("momentum", 1, seed=1) as leader:
        following, slow = followed(leader)
        assert len(following._left) > 20
        leader.run.observers.append(Told(following))
        for turn in range(20):
            following.part(state_transfer.state_part(leader.run, following.next))
            step(leader, turn)
            if following.diverging:
                break
        assert following.diverging
        assert not following.caught_up
        most = following.num_bytes
        assert most < 5 * state_transfer.copy_bytes(leader.run) + 100_000  # of which trees are some
        slow.go.set()
        assert following.end(False) is False
