"""The optimizer divided among the processes of a node is one optimizer: same steps, same state_dict, any class."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import launching
from nodes import build, gap, rows

HERE = Path(__file__).parents[1] / "support"
from states import BATCH, CASES, STEPS  # noqa: E402

START = "import sys; from paceline.launch import local; sys.exit(local.start(sys.argv[2:], sys.argv[1]))"
SLICED = ("sgd", "groups", "fused", "asgd")


@pytest.fixture(scope="module", params=["processes:3"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    command = [sys.executable, "-W", "error", str(HERE / "scripts" / "states.py"), str(folder), *CASES, "refusals"]
    done = subprocess.run(
        [sys.executable, "-c", START, request.param, *command],
        env={**os.environ, "PYTHONPATH": launching.python_path()},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, int(request.param.split(":")[1])


def alone(case):
    """Plain PyTorch on the whole batch: (losses, state in the middle, weights at the end)."""
    model, losses, state = build(), [], {}
    optimizer = CASES[case](model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for seed in range(STEPS):
        if seed == 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = CASES[case](model)
            optimizer.load_state_dict(copy.deepcopy(state))
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        x, y = rows(BATCH, seed)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses, state, model.state_dict()


@pytest.mark.dear
@pytest.mark.parametrize("case", CASES)
def test_steps_and_state_are_those_of_one_process(trained, case):
    folder, size = trained
    losses, state, weights = alone(case)
    for rank in range(size):
        division, got_losses, got_state, got_weights = torch.load(folder / f"{case}-{rank}.pt", weights_only=True)
        assert division == ("slices" if case in SLICED else "whole tensors")
        assert got_losses == pytest.approx(losses, rel=1e-9)
        assert gap(got_weights, weights) < 1e-9
        same(got_state, state)


def same(one, other):
    assert type(one) is type(other) or {type(one), type(other)} <= {int, float}, (one, other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, torch.Tensor):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-12)
    else:
        assert one == pytest.approx(other) if isinstance(one, float) else one == other


@pytest.mark.dear
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("coupled", r"ValueError: optimizer Clipping .*cannot be divided among \d processes.*threads:k"),
        ("wide", r"ValueError: optimizer Wide updates a weight differently when there are others.*threads:k"),
        (
            "bound",
            r"ValueError: optimizer Bound cannot be tried on two tensors .*a parameter that is not known.*threads:k",
        ),
        ("closure", r"ValueError: .*LBFGS computes the loss several times per step"),
        ("group", r"ValueError: a parameter group was added after join\(\).*before join"),
        ("groups", r"ValueError: the optimizer has groups of \[6\] parameters, the state to load is of \[1\]"),
        ("alone", r".*: local rank 0 is gathering the optimizer's state, local rank \d is at .*every process"),
        ("late", r"RuntimeError: optimizer\.state_dict\(\) was called after .*before pace\.close"),
    ],
)
def test_wrong_uses_are_refused_by_every_process(trained, what, words):
    folder, size = trained
    for rank in range(size):
        said = json.loads((folder / f"refusals-{rank}.json").read_text())
        assert re.match(words, said[what]), said[what]


@pytest.mark.dear
def test_cores_are_given_back(trained):
    folder, size = trained
    for rank in range(size):
        assert json.loads((folder / f"refusals-{rank}.json").read_text())["cores"] == sorted(os.sched_getaffinity(0))
