"""Epochs count on from call to call, an export is a plain model's, and the record has every step."""

import itertools
import multiprocessing
import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import cases
import paceline
from paceline.data import sampler
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
        assert samples == sampler.permutation(3, epoch, 10).tolist()
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
    assert (pace.epoch, pace.next_step, pace.num_steps) == (0, 0, 1)
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
        model[1].requires_grad_(False)  # as many as were frozen before
        with pytest.raises(ValueError, match=r"0\.weight, 0\.bias began to ask for a gradient after join\(\)"):
            pace.step(rows)
        pace.backward(torch.nn.functional.cross_entropy(model(rows[0]), rows[1]), 4)
        with pytest.raises(ValueError, match=r"0\.weight, 0\.bias began to ask for a gradient after join\(\)"):
            pace.update()


@pytest.mark.parametrize("how", [{"accumulate": 4}, {"engine": "replicas:2"}])
def test_a_short_last_batch_leaves_no_part_a_single_row_to_normalise(how):
    """torch refuses to: "Expected more than 1 value per channel when training"."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.utils.data.TensorDataset(torch.randn(19, 4), torch.arange(19) % 2)
    words = {"batch_size": 8, "engine": "sequential", **how}
    with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, **words) as pace:
        held = [pace.agreement.vote.weight for batch in pace.batches(rows) if pace.step(batch) < 1e9]
    assert held == [8, 8, 3]


class OneAndTwo(torch.utils.data.Sampler):
    """Draws anew each time."""

    def __iter__(self):
        return iter(torch.tensor([1, 2])[torch.randperm(2)].tolist())

    def __len__(self):
        return 2


def test_a_loaders_sampler_says_what_is_evaluated():
    """Story: the usual split for validation was evaluated with the samples of training in it."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.utils.data.TensorDataset(torch.zeros(5, 1), 10.0 ** torch.arange(5))
    batches = torch.utils.data.BatchSampler([3, 4, 3], 2, False)
    found = {}
    with paceline.join(
        model, optimizer, torch.nn.functional.mse_loss, batch_size=4, metric=lambda _, y: y.sum(), engine="sequential"
    ) as pace:
        for name, words in {
            "whole": {"batch_size": 4},
            "shuffled": {"batch_size": 4, "shuffle": True},
            "some": {"batch_size": 4, "sampler": OneAndTwo()},
            "batches": {"batch_sampler": batches},
        }.items():
            loader = torch.utils.data.DataLoader(rows, **words)
            before = torch.get_rng_state()
            found[name] = pace.evaluate(loader)
            assert torch.equal(torch.get_rng_state(), before)
    assert found == {"whole": 11111 / 5, "shuffled": 11111 / 5, "some": 55.0, "batches": 12000 / 3}


def test_what_is_kept_or_evaluated_or_the_last_is_levelled_before(tmp_path, monkeypatch):
    """Where an exchange lets the nodes' weights differ between two steps."""
    with joined(folder=tmp_path, scheduler=None) as pace:
        levelled = []
        monkeypatch.setattr(pace.exchange, "consensus", "period", raising=False)
        monkeypatch.setattr(pace.exchange, "average", lambda weights, *when: levelled.append((len(weights), *when)))
        counts = []
        for doing in (
            pace.save,
            lambda: pace.export(tmp_path / "w.safetensors"),
            lambda: pace.evaluate(DATA, lambda output, _: output.sum()),
        ):
            doing()
            counts.append(len(levelled))
    assert counts == [1, 2, 3]
    state = True, False, False, True  # a divided optimizer's, for a checkpoint and at the end
    assert levelled == [(len(pace.engine.weights), True, each) for each in state]


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
        pace.run.stop_signal = 15
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


def test_micro_batches_of_a_whole_batch_are_as_small_as_was_asked_for():
    """An image has many values to normalise: four of them in four parts take a quarter of the memory."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    rows = torch.utils.data.TensorDataset(torch.randn(7, 1, 4, 4), torch.arange(7) % 2)
    words = {"batch_size": 4, "accumulate": 4, "engine": "sequential"}
    with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, **words) as pace:
        for batch in pace.batches(rows, shuffle=False):
            pace.step(batch)
    assert seen == [1, 1, 1, 1, 3]


class Readers(torch.utils.data.Dataset):
    """Each sample says in which process it was read."""

    def __len__(self):
        return 13

    def __getitem__(self, i):
        return torch.full((2,), float(i)), torch.tensor(os.getpid())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_reads_with_the_loaders_processes_and_leaves_none(workers):
    with joined(scheduler=None) as pace:
        loader = torch.utils.data.DataLoader(Readers(), batch_size=4, num_workers=workers)
        pids = []

        def metric(output, target):
            pids.extend(target.tolist())
            return torch.tensor(float(len(target)))

        before = torch.get_rng_state()
        assert pace.evaluate(loader, metric, rows=4) == 1.0
        assert torch.equal(torch.get_rng_state(), before)
        assert len(pids) == 13
        assert (os.getpid() in pids) == (workers == 0)
        assert len(set(pids)) == max(1, workers)
        with pytest.raises(ZeroDivisionError):
            pace.evaluate(loader, lambda output, target: 1 / 0, rows=4)
    assert not [each for each in multiprocessing.active_children() if each.is_alive()]
