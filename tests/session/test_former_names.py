"""What methods were called once is read wherever their names are, and means today's."""

import pytest
import torch
from torch.nn import functional as F

import paceline
from paceline import registry
from paceline.planner.candidates import split

FORMER = [(room, was, now) for room, names in registry.FORMER_NAMES.items() for was, now in names.items()]


@pytest.mark.parametrize(("room", "was", "now"), FORMER)
def test_a_former_name_finds_what_it_is_called_today(room, was, now):
    assert registry.module(room, was) is registry.module(room, now)
    assert now in registry.names(room)
    assert was not in registry.names(room)
    assert registry.current(room, f"{was}:8+bf16") == f"{now}:8+bf16"
    assert registry.current(room, f"{was}s:8") == f"{was}s:8"


def test_the_row_of_an_old_plan_is_one_of_today():
    assert split("virtual:8+bf16", 4) == split("reproducible:8+bf16", 4)


def joined(folder, **words):
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return paceline.join(model, optimizer, F.cross_entropy, batch_size=8, folder=folder, **words)


@pytest.mark.parametrize(
    ("words", "row", "exchange"),
    [
        ({"engine": "virtual:4", "exchange": "tree"}, "reproducible:4", "ordered"),
        ({"engine": "virtual:4"}, "reproducible:4", "ordered"),
        ({"engine": "virtual:4", "reproducible": True}, "reproducible:4", "ordered"),
        ({"engine": "sequential", "exchange": "periodic:2"}, "sequential", "local_sgd"),
    ],
)
def test_a_script_and_a_checkpoint_of_the_version_before_go_on(tmp_path, words, row, exchange):
    batch = torch.ones(8, 4), torch.arange(8) % 3
    with joined(tmp_path, **words) as pace:
        assert (pace.row, pace.run.methods["exchange"]) == (row, exchange)
        pace.step(batch)
        was = {now: then for room, then, now in FORMER if room == "exchange"}[exchange]
        pace.run.row, pace.run.methods = words["engine"], {**pace.run.methods, "exchange": was}  # as they were called
        kept = pace.exchange.state()
        pace.save()
    with joined(tmp_path, **words) as pace:
        taken, load = [], pace.exchange.load
        pace.exchange.load = lambda state: (taken.append(state), load(state))
        assert pace.restore()
        assert [set(state) for state in taken] == ([set(kept)] if kept else [])
        pace.step(batch)
