"""The state of a run in parts: each row goes once, with what the optimizer keeps of it, and comes bit by bit."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline import handover

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
    monkeypatch.setattr(handover, "PART_BYTES", 4096)
    with trained(kind, 3, seed=1) as leader, trained(kind, steps, seed=2) as guest:
        parts = handover.parts(leader)
        rows = Counter((name, row) for part in parts for name, start, stop in part for row in range(start, stop))
        cut = {name for part in parts for name, _, stop in part if stop}
        assert bool(cut) == (kind != "adafactor"), "rows of its weights do not stand alone"
        weights = leader.engine.state()
        assert all(rows[name, row] == 1 for name in cut for row in range(len(weights[name])))
        assert sum(rows.values()) == sum(len(weights[name]) for name in cut)
        assert sorted(name for part in parts for name, _, stop in part if not stop) == sorted(weights.keys() - cut)
        assert len(parts) > 1
        for part in parts:
            message = handover.Message(handover.part(leader, part))
            assert kind == "adafactor" or message.num_bytes < 3 * handover.PART_BYTES
            handover.take_part(guest, handover.read(bytearray(b"".join(bytes(each) for each in message.parts()))))
        assert all(torch.equal(value, guest.engine.state()[name]) for name, value in weights.items())
        theirs, mine = (each.engine.optimizer_state()["state"] for each in (leader, guest))
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
