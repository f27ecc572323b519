"""Several optimizers of one model are each what they would be alone, on any engine and number of nodes."""

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
import ranks
from launching import PATH, launch
from nodes import Plain, Rank, build, gap, rows
from paceline.engine.node.optimizer_shards import SLICES, division
from paceline.engine.node.several_optimizers import SeveralOptimizers, as_one
from paceline.engine.replicas import Engine as Replicas

DATA = [rows(24, seed) for seed in range(4)]


def two(parameters):
    """Muon for matrices, AdamW for all else."""
    given = list(parameters)
    return [
        torch.optim.Muon([p for p in given if p.dim() == 2], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([p for p in given if p.dim() != 2], lr=0.01),
    ]


def alike(parameters):
    given = list(parameters)
    return [torch.optim.SGD(given[:1], lr=0.1, momentum=0.9), torch.optim.AdamW(given[1:], lr=0.01)]


def plain(kind, clip=None, data=DATA):
    model = build(Plain)
    optimizers = kind(model.parameters())
    for x, y in data:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for each in optimizers:
            each.step()
    return model.state_dict(), [each.state_dict() for each in optimizers]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", [two, alike])
@pytest.mark.parametrize(
    "how", [{}, {"engine": Replicas}, {"exchange": "server"}], ids=["sequential", "replicas", "server"]
)
def test_each_steps_as_if_alone(kind, clip, how):
    if kind is two and "exchange" in how:
        with pytest.raises(ValueError, match=r"optimizer Muon\+AdamW may need whole weights"):
            ranks.run(2, lambda link: Rank(link, build(Plain), lambda p: as_one(kind(p)), **how))
        return
    how = {**how, "engine": how["engine"](2)} if "engine" in how else how

    def work(link):
        rank = Rank(link, build(Plain), lambda p: as_one(kind(p)), clip=clip, **copy.copy(how))
        rank.train(DATA)
        return rank.state()

    want, _ = plain(kind, clip)
    for state in ranks.run(1 if "engine" in how else 2, work):
        assert gap(state, want) < 1e-11


@pytest.mark.parametrize("scheduled", [(1,), (1, 0)])
def test_a_checkpoint_has_all_of_their_states_and_each_has_its_own(scheduled, tmp_path):
    def joined(folder):
        model = build(Plain)
        optimizers = two(model.parameters())
        schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizers[number], 0.5) for number in scheduled]
        how = {"batch_size": 24, "engine": "sequential", "folder": folder}
        how["scheduler"] = schedules if len(schedules) > 1 else schedules[0]
        return model, optimizers, paceline.join(model, optimizers, F.cross_entropy, **how)

    model, optimizers, pace = joined(tmp_path)
    with pace:
        for batch in DATA[:2]:
            pace.step(batch)
        pace.save()
        for batch in DATA[2:]:
            pace.step(batch)
        for number, each in enumerate(optimizers):
            first, expected = (0.02, 0.01)[number], 1 / 16 if number in scheduled else 1
            assert each.param_groups[0]["lr"] == pytest.approx(first * expected)
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) was called beside pace\.step"):
            optimizers[0].step()
        for refused in (optimizers[0].load_state_dict, optimizers[0].add_param_group):
            with pytest.raises(RuntimeError, match=r"of one of several optimizers was called after join\(\)"):
                refused({})
    again, others, pace = joined(tmp_path)
    with pace:
        assert pace.restore()
        for batch in DATA[2:]:
            pace.step(batch)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    for one, other in zip(optimizers, others, strict=True):
        mine, its = one.state_dict(), other.state_dict()
        assert mine["param_groups"] == its["param_groups"]
        fresh = two(build(Plain).parameters())[optimizers.index(one)]
        fresh.load_state_dict(mine)  # as of an optimizer without the other
        for number, state in mine["state"].items():
            assert all(torch.equal(value, its["state"][number][key]) for key, value in state.items())


def scheduled(folder, numbers):
    model = build(Plain)
    optimizers = alike(model.parameters())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizers[number], 0.5) for number in numbers]
    how = {"batch_size": 24, "engine": "sequential", "folder": folder}
    return paceline.join(model, optimizers, F.cross_entropy, scheduler=schedules, **how)


@pytest.mark.parametrize(("before", "after"), [((0, 1), (0,)), ((0,), (0, 1)), ((0, 1), (0, 1, 1))])
def test_a_checkpoint_of_another_number_of_schedulers_is_refused(before, after, tmp_path):
    with scheduled(tmp_path, before) as pace:
        pace.step(DATA[0])
        pace.save()
    with (
        scheduled(tmp_path, after) as pace,
        pytest.raises(ValueError, match=rf"has the state of {len(before)} scheduler.*and join was given {len(after)}"),
    ):
        pace.restore()


def test_what_is_none_among_several_schedulers_is_told(tmp_path):
    model = build(Plain)
    optimizers = alike(model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0])
    with pytest.raises(ValueError, match=r"needs a metric.*scheduler must be a torch.optim.lr_scheduler, got None"):
        paceline.join(model, optimizers, F.cross_entropy, batch_size=24, scheduler=[plateau, None])


class Plainest(torch.optim.SGD):
    """Whose step takes nothing, as those of some scripts do."""

    def step(self):
        super().step()


class Ahead(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "more": 1}


def test_they_may_be_joined_again_and_are_their_own_afterwards():
    model = build(Plain)
    given = list(model.parameters())
    optimizers = [Plainest(given[:1], lr=0.1, momentum=0.9), torch.optim.AdamW(given[1:], lr=0.01)]
    how = {"batch_size": 24, "engine": "sequential"}
    with pytest.raises(ValueError, match="clip is a global norm"):
        paceline.join(model, optimizers, F.cross_entropy, clip=-1, **how)
    for _ in range(2):
        with paceline.join(model, optimizers, F.cross_entropy, **how) as pace:
            pace.step(DATA[0])
    assert [len(each.state) for each in optimizers] == [1, len(given) - 1]
    state = optimizers[1].state_dict()
    optimizers[1].load_state_dict(state)
    F.cross_entropy(model(DATA[0][0]), DATA[0][1]).backward()
    for each in optimizers:
        each.step()
    assert {int(state["step"]) for state in optimizers[1].state.values()} == {3}


def test_what_cannot_be_used_together_is_an_error():
    model = build(Plain)
    given = list(model.parameters())
    with pytest.raises(ValueError, match=r"join: the optimizers cannot be used together: .* more than one"):
        paceline.join(model, [torch.optim.SGD(given, lr=0.1), torch.optim.SGD(given[:1], lr=0.1)], batch_size=4)
    with pytest.raises(ValueError, match="together: Ahead has a state_dict of its own kind"):
        paceline.join(model, [Ahead(given[:1], lr=0.1), torch.optim.SGD(given[1:], lr=0.1)], batch_size=4)
    with pytest.raises(ValueError, match="LBFGS computes the loss several times"):
        paceline.join(model, [torch.optim.LBFGS(given[:1]), torch.optim.SGD(given[1:], lr=0.1)], batch_size=4)
    with pytest.raises(ValueError, match=r"optimizer must be a torch\.optim\.Optimizer or a list of these, got"):
        paceline.join(model, [1, 2], batch_size=4)


def test_work_is_divided_by_slices_where_all_are_elementwise():
    assert division(SeveralOptimizers(alike(build(Plain).parameters()))) == SLICES
    assert division(SeveralOptimizers(two(build(Plain).parameters()))) == "whole tensors"


SCRIPT = """
import sys, torch, paceline
from torch.nn import functional as F
from nodes import Plain, build
from test_several_optimizers import DATA, plain, two
from nodes import gap

model = build(Plain)
optimizers = two(model.parameters())
with paceline.join(model, optimizers, F.cross_entropy, batch_size=24) as pace:
    for x, y in DATA:
        rows = pace.run.assignment.rows(24)
        pace.step((x[rows.start : rows.stop], y[rows.start : rows.stop]))
    states = [each.state_dict() for each in optimizers]
    want, its = plain(two)
    assert gap(model.state_dict(), want) < 1e-11
    for state, other in zip(states, its, strict=True):
        assert state["param_groups"] == other["param_groups"]
        for number, values in other["state"].items():
            for key, value in values.items():
                assert (state["state"][number][key] - value).norm() <= 1e-11 * value.norm(), (number, key)
"""


@pytest.mark.dear
@pytest.mark.parametrize("engine", ["processes:2"])
def test_processes_divide_their_work_and_gather_the_state_of_each(tmp_path, engine):
    (tmp_path / "train.py").write_text(SCRIPT)
    launch(str(tmp_path / "train.py"), engine=engine, PYTHONPATH=f"{Path(__file__).parent}{os.pathsep}{PATH}")
