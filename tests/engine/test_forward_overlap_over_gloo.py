"""Over a real link: the same losses, checkpoints and weights, bit by bit, whether updates wait or not."""

import os

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import paceline
from launching import launch
from nodes import build
from paceline.report.record import read


@pytest.mark.dear
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_the_same_training(tmp_path, num_nodes):
    launch("ahead.py", tmp_path, engine="sequential", num_nodes=num_nodes)
    everyone = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(num_nodes)]
    kinds = {name.split()[0] for name in everyone[0]}
    for kind in sorted(kinds):
        want = everyone[0][f"{kind} backward"]
        for said in everyone:
            got = said[f"{kind} forward"]
            assert got["losses"] == want["losses"], kind
            assert got["right"] == want["right"], kind
            assert all(torch.equal(got["state"][name], want["state"][name]) for name in want["state"]), kind
    one, other = (
        load_file(next((tmp_path / f"plain-{overlap}").glob("**/*.safetensors"))) for overlap in ("backward", "forward")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    events = read(tmp_path / "plain-forward")
    assert next(event for event in events if event["event"] == "join")["overlap"] == "forward"
    told = [event for event in events if event["event"] == "forms"]
    assert told[-1]["forms"].count("factors") == 2
    assert any(line.startswith("second.weight: factors; ") for line in told[-1]["why"])


def join(overlap="forward", optimizer=None, **options):
    model = build()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return paceline.join(model, optimizer, F.cross_entropy, batch_size=8, overlap=overlap, **options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"clip": 1.0, "engine": "sequential"}, "clip=1 needs the norm of the whole gradient"),
        ({"precision": "fp16", "engine": "sequential"}, "fp16 scales the loss"),
        ({"exchange": "local_sgd:2", "engine": "sequential"}, "the exchange has no gradients that arrive later"),
        ({"engine": "replicas:2"}, "engine 'replicas:2' updates all weights at once: use sequential or threads:k"),
        ({"engine": "sequential+compile"}, "compiles the model"),
        ({"overlap": "sideways"}, "overlap is one of backward, forward, got 'sideways'"),
    ],
)
def test_what_cannot_wait_is_refused_with_its_reason(options, why):
    with pytest.raises(ValueError, match=why.replace("+", r"\+")):
        join(**options)


def test_all_reasons_at_once_and_by_the_environment(monkeypatch):
    monkeypatch.setitem(os.environ, "PACELINE_OVERLAP", "forward")
    with pytest.raises(ValueError, match=r"clip=2 .*; and engine|engine .*; clip=2 "):
        join(None, clip=2.0, engine="replicas:2")


def test_alone_there_is_nothing_to_wait_for():
    with join(engine="sequential") as pace:
        loss = pace.step((torch.ones(8, 96, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)))
        assert loss == loss
        with pytest.raises(ValueError, match="overlap='backward'"):
            pace.clip(1.0)
