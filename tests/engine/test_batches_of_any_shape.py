"""Whatever a batch, a call and a loss look like, the training is that of a plain loop; else one error says why."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import cases
import paceline
from launching import launch
from nodes import gap
from paceline.engine.compute import batch as batches


@pytest.fixture(scope="module", params=[("processes:2", 1), ("sequential", 2)], ids=["processes:2", "two nodes"])
def trained(request, tmp_path_factory):
    engine, num_nodes = request.param
    folder = tmp_path_factory.mktemp("trained")
    launch("laws.py", folder, 21, "shape", engine=engine, num_nodes=num_nodes)
    return folder


def same(got, want):
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-12)
    assert gap(got["weights"], want["weights"]) < 1e-10


@pytest.mark.parametrize("name", cases.SHAPES)
def test_one_process(name):
    case = cases.SHAPES[name]
    same(case.train(21, "sequential"), case.plain(21))


@pytest.mark.dear
@pytest.mark.parametrize("name", cases.SHAPES)
def test_several_processes(trained, name):
    said = json.loads((trained / f"shape {name}.json").read_text())
    said["weights"] = load_file(trained / f"shape {name}.safetensors")
    same(said, cases.SHAPES[name].plain(21))


@pytest.mark.dear
def test_every_part_of_a_loss_is_told(trained):
    want = cases.SHAPES["several losses"].plain(21)["losses"][-1]
    terms = json.loads((trained / "shape several losses.json").read_text())["terms"]
    assert list(terms) == ["entropy", "size", "shift"]
    assert sum(terms.values()) == pytest.approx(want, rel=1e-12)
    assert all(value != 0 for value in terms.values())


def test_the_parts_are_in_the_record(tmp_path):
    model = nn.Linear(4, 3)
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    with paceline.join(
        model, torch.optim.SGD(model.parameters(), lr=0.1), cases.parts, batch_size=8, folder=tmp_path
    ) as pace:
        for batch in pace.batches(data):
            pace.step(batch)
    steps = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines() if '"step"' in line]
    assert set(steps[0]["terms"]) == {"entropy", "size", "shift"}


WRONG = {
    "nothing": (lambda output, y: None, "returned None"),
    "a number": (lambda output, y: 0.5, "returned 0.5"),
    "one per row": (
        lambda output, y: F.cross_entropy(output, y, reduction="none"),
        r"returned a tensor of shape \(8,\), float32",
    ),
    "a count": (lambda output, y: (output.argmax(1) == y).sum(), r"returned a tensor of shape \(\), int64"),
    "three": (lambda output, y: (output.sum(), 1, 2), r"returned \(a tensor of shape \(\), float32, 1, 2\)"),
    "a negative weight": (lambda output, y: (output.sum(), -1), ".*-1"),
    "a weight that is no number": (lambda output, y: (output.sum(), float("nan")), ".*nan"),
    "a weight per row": (lambda output, y: (output.sum(), torch.ones(8)), r".*shape \(8,\), float32\)"),
    "a list": (lambda output, y: [output.sum(), 8], "returned a list"),
    "an empty dict": (lambda output, y: {}, r"returned \{\}"),
    "a dict of vectors": (
        lambda output, y: {"each": output[:, 0]},
        r"returned \{'each': a tensor of shape \(8,\), float32\}",
    ),
    "words": (lambda output, y: "low", "returned a str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_one_error_that_says_what_is_accepted(name):
    loss, words = WRONG[name]
    model = nn.Linear(4, 3)
    before = model.weight.clone()
    pace = paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch_size=8)
    with pytest.raises(ValueError, match=f"^the loss {words}.*; return one number .* dict of means by name$"):
        pace.step((torch.ones(8, 4), torch.arange(8) % 3))
    assert torch.equal(model.weight, before)
    pace.close()


@pytest.mark.parametrize(
    ("batch", "loss", "words"),
    [
        ((torch.tensor(1.0), torch.tensor(2.0)), F.mse_loss, "a batch must hold tensors with the samples first"),
        (([1, 2], [3, 4]), F.mse_loss, "a batch must hold tensors with the samples first"),
        ((torch.ones(8, 4), torch.ones(8, 3)), None, "takes the loss from the model's output, but Tensor has none"),
    ],
)
def test_a_wrong_batch_says_what_to_do(batch, loss, words):
    model = nn.Linear(4, 3)
    pace = paceline.join(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch_size=8, forward=lambda m, b: torch.ones(8, 3)
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        pace.step(batch)
    pace.close()


def test_splitting_and_joining_is_the_batch():
    batch = cases.Point({"a": torch.arange(7), "k": torch.tensor(3.0)}, [torch.arange(14).view(7, 2), "name"])
    for count in (1, 2, 3, 7, 9):
        parts = batches.split(batch, count)
        assert [type(part) for part in parts] == [cases.Point] * min(count, 7)
        assert torch.equal(torch.cat([part.x["a"] for part in parts]), batch.x["a"])
        assert torch.equal(torch.cat([part.y[0] for part in parts]), batch.y[0])
        assert all(part.x["k"] == 3.0 and part.y[1] == "name" for part in parts)
        sizes = [batches.count(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_optimizers_that_cannot_be_served_are_refused():
    model = nn.Linear(4, 3)
    for kind, words in ((torch.optim.LBFGS, "several times per step"), (torch.optim.SparseAdam, "sparse gradients")):
        with pytest.raises(ValueError, match=words):
            paceline.join(model, kind(model.parameters()), F.mse_loss, batch_size=8)
