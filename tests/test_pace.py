"""Epochs count on from call to call, an export is a plain model's, and the record has every step."""

import itertools

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import cases
import paceline
from paceline.data import order
from paceline.report import record

DATA = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))


def joined(model=None, **options):
    model = model or nn.Linear(2, 1)
    options = {"batch_size": 4, "engine": "sequential", **options}
    return paceline.join(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        lambda output, y: (output[:, 0] - y).square().mean(),
        **options,
    )


def run(pace, epochs, stop=None):
    """(epoch, step) of each batch, and which samples it had."""
    seen = []
    for batch in pace.batches(DATA, epochs):
        seen.append((batch.epoch, batch.step, batch.indices.tolist()))
        pace.step(batch)
        if len(seen) == stop:
            break
    return seen


def test_epochs_count_on_from_call_to_call():
    pace = joined(seed=3)
    first, second = run(pace, 2), run(pace, 1)
    assert [epoch for epoch, _, _ in first + second] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for epoch, batches in itertools.groupby(first + second, lambda item: item[0]):
        samples = [i for _, _, indices in batches for i in indices]
        assert samples == order.permutation(3, epoch, 10).tolist()
    assert (pace.epoch, pace.next_step) == (3, 0)
    pace.close()


def test_an_epoch_that_is_left_is_over():
    pace = joined()
    assert [(e, s) for e, s, _ in run(pace, 3, stop=2)] == [(0, 0), (0, 1)]
    assert [(e, s) for e, s, _ in run(pace, 1)] == [(1, 0), (1, 1), (1, 2)]
    pace.close()


def test_rows_of_ones_own_have_no_place_in_an_epoch():
    pace = joined()
    pace.step((torch.ones(4, 2), torch.ones(4)))
    assert (pace.epoch, pace.next_step, pace.loop.num_steps) == (0, 0, 1)
    pace.close()


def test_export_loads_into_a_plain_model(tmp_path):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
            self.same = self.net[0]

        def forward(self, x):
            return self.net(x)

    pace = joined(Small())
    run(pace, 1)
    pace.facts["classes"] = ["even", "odd"]
    pace.export(tmp_path / "weights.safetensors")
    other = Small()
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    x = torch.randn(4, 2)
    assert torch.equal(other.eval()(x), pace.job.model.eval()(x))
    pace.close()


def test_the_record_has_every_step(tmp_path):
    with joined(folder=tmp_path, scheduler=None) as pace:
        losses = [pace.step(batch) for batch in pace.batches(DATA, 2)]
        pace.save()
    events = record.read(tmp_path)
    assert [e["event"] for e in events if e["event"] != "usage"] == ["join", *["step"] * 6, "checkpoint", "end"]
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(6))
    assert [e["epoch"] for e in steps] == [0, 0, 0, 1, 1, 1]
    assert [e["loss"] for e in steps] == pytest.approx(losses, rel=1e-5)
    assert {e["verdict"] for e in steps} == {"apply"}


def test_a_model_is_the_users_own_again_after_the_end():
    model = cases.Net()
    with joined(model) as pace:
        run(pace, 0)
    x = torch.randn(3, cases.IN)
    loss = F.cross_entropy(model(x), torch.tensor([0, 1, 2]))
    loss.backward()
    assert model.second.weight.grad is not None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_saving_needs_a_folder():
    pace = joined()
    for method in (pace.save, pace.restore):
        with pytest.raises(ValueError, match=r"needs a folder: \w+\('runs/mine'\), or join\(folder='runs/mine'\)"):
            method()
    pace.close()


def test_a_layer_unfrozen_after_joining_is_told():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=4, engine="sequential") as pace:
        rows = torch.randn(4, 4), torch.arange(4) % 2
        pace.step(rows)
        model[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"0\.weight, 0\.bias began to ask for a gradient after join\(\)"):
            pace.step(rows)


def test_a_trial_neither_reads_nor_writes_the_run(tmp_path, monkeypatch):
    with joined(folder=tmp_path, scheduler=None) as pace:
        pace.step(next(iter(pace.batches(DATA))))
        kept = pace.save()
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setenv("PACELINE_TRIAL", str(tmp_path.with_name("trial.json")))
    with joined(folder=tmp_path, scheduler=None) as pace:
        assert kept
        assert not pace.restore()
        pace.step(next(iter(pace.batches(DATA))))
        assert pace.save() is None
        pace.export(tmp_path / "weights.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_signal_after_the_last_step_is_told_by_the_exit_code():
    with pytest.raises(paceline.Stopped) as raised, joined(scheduler=None) as pace:
        pace.loop.stop = 15
    assert raised.value.code == 143


def test_a_refused_step_is_in_the_record(tmp_path):
    """A weight that is used outside its layer, too, has a gradient that its factors are not."""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(256, 256)

        def forward(self, x):
            return self.layer(x) @ self.layer.weight

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.randn(4, 256), torch.arange(4)
    loss = torch.nn.functional.cross_entropy
    with paceline.join(model, optimizer, loss, batch_size=4, engine="sequential", folder=tmp_path) as pace:
        pace.step(rows)
        pace.step(rows)
    happened = [event["event"] for event in record.read(tmp_path) if event["event"] in ("redo", "step")]
    assert happened == ["redo", "step", "step"]
