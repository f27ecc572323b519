"""What scripts for other libraries do with the loss, the model and the handle is answered with what to write."""

from __future__ import annotations

import collections.abc
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler, TensorDataset

import paceline
from launching import environment, launch, small
from paceline.exchange.flow import gather
from paceline.step.like_torch import LossValue, UnreadLoss, hint_for

X, Y = torch.randn(10, 3, generator=torch.Generator().manual_seed(1)), torch.arange(10) % 2


def joined(model=None, **options):
    model = model or nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, paceline.join(model, optimizer, F.cross_entropy, batch_size=4, engine="sequential", **options)


LOSSES = {"read": LossValue, "not read": lambda value: UnreadLoss(lambda: value)}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_gradient_scaler_is_told_to_be_left_out(kind):
    """Story: torch said that outputs must be a tensor or an iterable of tensors."""
    with pytest.raises(TypeError, match=r"leave torch\.amp\.GradScaler out, and give join\(precision='fp16'\)"):
        torch.amp.GradScaler("cpu").scale(LOSSES[kind](1.5))


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_is_no_sequence_for_all_that(kind):
    loss = LOSSES[kind](1.5)
    assert not hasattr(loss, "__iter__")
    assert not np.iterable(loss)
    assert not isinstance(loss, collections.abc.Collection)
    with pytest.raises(TypeError, match="cannot be iterated over"):
        list(loss)
    assert float(torch.as_tensor([float(loss), 1.0]).sum()) == 2.5
    if kind == "read":
        assert np.asarray([loss, 1.0]).tolist() == [1.5, 1.0]
        assert torch.tensor([loss, loss]).tolist() == [1.5, 1.5]
        assert np.mean([loss, loss]) == 1.5
        assert json.dumps({"loss": loss}) == '{"loss": 1.5}'


def test_code_that_asks_whether_the_model_is_wrapped_hears_that_it_is_not():
    model, pace = joined(nn.Sequential(nn.Linear(3, 2)))
    with pace:
        assert not hasattr(model, "module")
        assert not hasattr(model, "no_sync")
        assert type(model) is nn.Sequential


@pytest.mark.parametrize(
    ("use", "what"),
    [("model.module", "the model is your own object: use it"), ("model.no_sync()", "give join\\(accumulate=k\\)")],
)
def test_a_script_that_unwraps_the_model_is_told_what_to_write(tmp_path, use, what):
    """Story: it ended with torch's error alone, that a Linear has no such attribute."""
    script = small(tmp_path, use)
    done = subprocess.run(
        [sys.executable, script],
        env=environment(PACELINE_ENGINE="sequential"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "AttributeError: 'Linear' object has no attribute" in done.stderr
    assert f"paceline: join() does not wrap the model: {what}".replace("\\", "") in done.stderr


def test_a_model_that_cannot_be_pickled_is_saved_by_its_weights(tmp_path):
    """Story: the error named a function inside of one of ours."""
    model, pace = joined(nn.Linear(512, 256))
    with pace:
        with pytest.raises((AttributeError, pickle.PicklingError, TypeError)) as raised:
            torch.save(model, tmp_path / "model.pt")
        assert "torch.save(model.state_dict(), path)" in hint_for(raised.value, [model])
        assert hint_for(raised.value, [nn.Linear(512, 256)]) == ""
        assert hint_for(AttributeError("Can't pickle local object 'main.<locals>.<lambda>'"), [model]) == ""


@pytest.mark.parametrize("use", [lambda: DistributedSampler([1, 2]), dist.get_rank, lambda: dist.all_reduce(X)])
def test_what_needs_a_process_group_is_told_what_does_without(use):
    """Story: torch said to call init_process_group, in a script whose ranks had met already."""
    with pytest.raises(ValueError, match="Default process group") as raised:
        use()
    assert "give pace.batches the dataset" in hint_for(raised.value, [nn.Linear(1, 1)])
    assert hint_for(raised.value, []) == "", "no model has joined"


def test_other_errors_and_other_models_have_no_hint():
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    for owner, name in ((other, "module"), (model, "modul")):
        with pytest.raises(AttributeError) as raised:
            getattr(owner, name)
        assert hint_for(raised.value, [model]) == ""
    assert hint_for(ValueError("module"), [model]) == ""
    with pytest.raises(AttributeError) as raised:
        model.module  # noqa: B018
    assert "use it" in hint_for(raised.value, [other, model])


class Alone:
    """Of one process."""

    def all_gather(self, *messages):
        return list(messages)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3.1, torch.float64),
        (3, torch.int64),
        (True, torch.bool),
        ([1, 2], torch.int64),
        ([[1.5], [2.5]], torch.float64),
        (LossValue(0.1), torch.float64),
        (np.float32(1.5), torch.float32),
        (np.arange(3), torch.int64),
        (torch.tensor(1.5, dtype=torch.float16), torch.float16),
    ],
)
def test_numbers_are_gathered_and_reduced_as_tensors_are(value, dtype):
    """Story: 'float' object has no attribute 'detach'. Python's floats keep all their bits."""
    want = value.tolist() if hasattr(value, "tolist") else value
    for found in (gather.all_reduce(Alone(), value, "sum"), gather.gather(Alone(), value)):
        assert found.dtype == dtype
        assert found.tolist() == (want if found.dim() and isinstance(want, list) else [want] if found.dim() else want)


@pytest.mark.parametrize("value", ["three", None, {"a": 1}, [1, [2]], [torch.ones(2), torch.ones(3)]])
def test_what_is_no_number_is_told(value):
    with pytest.raises(TypeError, match=rf"gather\(\) takes a tensor, a number or a list.*got {type(value).__name__}"):
        gather.gather(Alone(), value)
    with pytest.raises(TypeError, match=r"all_reduce\(\) takes a tensor, a number"):
        gather.all_reduce(Alone(), value, "max")


@pytest.mark.parametrize("engine", ["sequential", "replicas:2"])
def test_a_step_after_the_end_is_told(engine):
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.join(model, sgd, F.cross_entropy, batch_size=4, engine=engine) as pace:
        pace.step((X[:4], Y[:4]))
    before = model.weight.clone()
    with pytest.raises(RuntimeError, match=r"a step is not possible any more: .* ended, with pace\.close\(\)"):
        pace.step((X[:4], Y[:4]))
    pace.backward(F.cross_entropy(model(X[:4]), Y[:4]), rows=4)
    with pytest.raises(RuntimeError, match="a step is not possible any more"):
        pace.update()
    assert torch.equal(model.weight, before)
    pace.close()
    assert pace.evaluate(TensorDataset(X, Y), lambda output, y: y.sum()) == 0.5  # alone it needs nobody


def test_what_needs_the_other_processes_is_told_after_the_end(tmp_path):
    """Story: a bad file descriptor, and local rank 1 was lost."""
    launch("closed.py", tmp_path, engine="processes:2")
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}").read_text())
        assert len(said) == 8
        for name, text in said.items():
            assert "this training has ended, with pace.close() or its `with` block" in text, name
