"""State transfer in parts: each row is sent once, with its optimizer state, and arrives bit for bit."""

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
            state_transfer.load_part(
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


class Sends(StepObserver):
    """Gives each step to the catch-up of a joining node."""

    def __init__(self, catch_up):
        self.catch_up = catch_up

    def applies(self, outcome, rule):
        return self.catch_up.before_update(outcome, rule)


class Slow:
    """Sends nothing before ``go`` is set."""

    def __init__(self):
        self.go, self.taken = threading.Event(), []

    def channel(self, name):
        return self

    def set_deadline_mode(self):
        pass

    def send(self, parts, num_bytes):
        assert self.go.wait(30.0)
        self.taken.append(bytearray(b"".join(bytes(part) for part in parts)))


def followed(leader):
    """A catch-up that begins now, and the channel that it sends on."""
    slow = Slow()
    catch_up = CatchUp(leader.run, slow, "late")
    catch_up._allocator.join(30.0)
    return catch_up, slow


def step(pace, seed):
    dice = torch.Generator().manual_seed(seed)
    return pace.step((torch.randn(8, 40, generator=dice), torch.randint(0, 3, (8,), generator=dice)))


def test_a_part_is_of_the_moment_in_which_it_was_copied(monkeypatch):
    """Also where the optimizer had no state yet when the buffers were allocated."""
    monkeypatch.setattr(state_transfer, "PART_BYTES", 4096)
    with trained("momentum", 0, seed=1) as leader:
        catch_up, slow = followed(leader)
        step(leader, 1)
        want = state_transfer.state_part(leader.run, catch_up.next)
        want = state_transfer.read(bytearray(b"".join(bytes(each) for each in state_transfer.Message(want).parts())))
        catch_up.part(state_transfer.state_part(leader.run, catch_up.next))
        step(leader, 2)
        slow.go.set()
        catch_up.end(True)
        found = state_transfer.read(slow.taken[0])
        assert found["states"].keys() == want["states"].keys() != set()
        for name, state in want["states"].items():
            assert torch.equal(found["states"][name]["momentum_buffer"], state["momentum_buffer"])
        assert all(torch.equal(found["part"][name], value) for name, value in want["part"].items())


def test_what_waits_to_be_sent_is_bounded(monkeypatch):
    """On a network that is slower than the steps, long before all parts are sent."""
    monkeypatch.setattr(state_transfer, "PART_BYTES", 512)
    with trained("momentum", 1, seed=1) as leader:
        catch_up, slow = followed(leader)
        assert len(catch_up._pending) > 20
        leader.run.observers.append(Sends(catch_up))
        for turn in range(20):
            catch_up.part(state_transfer.state_part(leader.run, catch_up.next))
            step(leader, turn)
            if catch_up.diverging:
                break
        assert catch_up.diverging
        assert not catch_up.caught_up
        most = catch_up.num_bytes
        assert most < 5 * state_transfer.copy_bytes(leader.run) + 100_000  # of which trees are some
        slow.go.set()
        assert catch_up.end(False) is False
