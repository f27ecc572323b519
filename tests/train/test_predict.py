"""Predictions equal those of the trained network; an error names a file or checkpoint that cannot be used."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.checkpoint.checkpoint import CheckpointError, write
from paceline.checkpoint.export import export
from paceline.data import images as folders
from paceline.data import sample
from paceline.train.classify import ROWS, predict
from paceline.train.models import small
from paceline.train.network import network

FACTS = {"model": "small", "classes": list(sample.CLASSES), "input": [1, 28, 28]}
TINY = """
import torch

def colour(num_classes):
    "Mean red, green and blue, as logits."
    head = torch.nn.Linear(3, num_classes)
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Dropout(0.9), head)

def flat(num_classes):
    return torch.nn.Flatten()

def nothing(num_classes):
    return num_classes

number = 3
"""


def trained_small():
    train, _ = sample.load()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = small.build(3)
        optimizer = torch.optim.SGD(model.parameters(), small.LEARNING_RATE, small.MOMENTUM)
        for indices in torch.randperm(len(train))[:1024].split(32):
            images, labels = train.fetch(indices.tolist(), 0)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    torch.set_num_threads(threads)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return trained_small()


@pytest.fixture
def run(tmp_path, model):
    """A run whose newest checkpoint is of the small model, trained a little."""
    write(tmp_path / "run", 1, small.build(3).state_dict(), {"facts": FACTS})
    write(tmp_path / "run", 2, model.state_dict(), {"facts": FACTS, "optimizer": [torch.ones(3)]})
    return tmp_path / "run"


@pytest.fixture
def pictures(tmp_path):
    """Images of the sample's test part, more than one forward pass takes."""
    _, test = sample.load()
    paths = []
    for index in range(ROWS + 3):
        pixels = test.fetch([index * 7], 0)[0][0, 0] * sample.STD + sample.MEAN
        paths.append(tmp_path / f"{index}.png")
        Image.fromarray((pixels * 255).round().byte().numpy()).save(paths[-1])
    return paths, test.fetch([index * 7 for index in range(ROWS + 3)], 0)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A user's module in the current folder."""
    (tmp_path / "tiny_networks.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    yield "tiny_networks"
    sys.modules.pop("tiny_networks", None)


def colours(run, weight, facts=None):
    weights = {"3.weight": weight, "3.bias": torch.zeros(3)}
    write(run, 1, weights, {"facts": facts or {**FACTS, "model": "tiny_networks:colour", "input": [3, 224, 224]}})


def test_the_small_network_says_what_it_says_of_the_sample(run, model, pictures):
    paths, (images, labels) = pictures
    found = predict(run, paths)
    with torch.no_grad():
        expected = model(images).softmax(1)
    assert [guess.image for guess in found] == paths
    for guess, row in zip(found, expected, strict=True):
        assert [name for name, _ in guess.top] == [sample.CLASSES[i] for i in row.argsort(descending=True)]
        # pixels went through whole levels, so not to the last bit
        assert [p for _, p in guess.top] == pytest.approx(row.sort(descending=True)[0].tolist(), abs=1e-4)
        assert sum(p for _, p in guess.top) == pytest.approx(1)
    right = [guess.top[0][0] == sample.CLASSES[label] for guess, label in zip(found, labels, strict=True)]
    assert np.mean(right) > 0.8


def test_run_checkpoint_and_export_say_the_same(run, model, pictures, tmp_path):
    export(tmp_path / "w.safetensors", model.state_dict(), FACTS)
    paths, _ = pictures
    answers = [predict(of, paths[:3], top=1) for of in (run, run / "checkpoint-00000002", tmp_path / "w.safetensors")]
    assert answers[0] == answers[1] == answers[2]
    assert [len(guess.top) for guess in answers[0]] == [1, 1, 1]
    assert predict(run, paths[:3], top=99)[0].top[0] == answers[0][0].top[0]
    assert predict(run / "checkpoint-00000001", paths[:3]) != predict(run, paths[:3])


def test_a_damaged_newest_checkpoint_is_passed_over_unless_it_was_named(run, pictures):
    paths, _ = pictures
    before = predict(run / "checkpoint-00000001", paths[:1])
    (run / "checkpoint-00000002" / "weights.safetensors").write_bytes(b"")
    assert predict(run, paths[:1]) == before
    with pytest.raises(CheckpointError, match="checkpoint-00000002"):
        predict(run / "checkpoint-00000002", paths[:1])


def test_colour_images_are_prepared_as_those_of_a_test(tmp_path, tiny):
    rng = np.random.default_rng(0)
    paths = [tmp_path / name for name in ("a.png", "b.jpg", "c.png")]
    Image.fromarray(rng.integers(0, 256, (300, 500, 3), np.uint8)).save(paths[0])
    Image.fromarray(rng.integers(0, 256, (400, 260, 3), np.uint8)).save(paths[1])
    Image.fromarray(rng.integers(0, 256, (40, 30), np.uint8)).save(paths[2])
    colours(tmp_path / "run", torch.eye(3) * 3)
    source = folders.ImageFolder(paths, [0] * 3, ("any",), train=False, seed=0)
    expected = (source.fetch(range(3), 0)[0].mean((2, 3)) * 3).softmax(1)
    found = predict(tmp_path / "run", paths)
    for guess, row in zip(found, expected, strict=True):
        assert dict(guess.top) == pytest.approx(dict(zip(sample.CLASSES, row.tolist(), strict=True)), abs=1e-6)
    # dropout is off, and nothing is drawn
    assert predict(tmp_path / "run", paths) == found


def test_grey_and_colour_files_of_any_size_fit_the_small_network(run, tmp_path):
    kinds = {"L": (28, 28), "RGB": (60, 20), "P": (1, 1), "RGBA": (300, 200), "1": (30, 30), "CMYK": (9, 9)}
    paths = []
    for mode, size in kinds.items():
        paths.append(tmp_path / f"{mode}.tiff")
        Image.new(mode, size).save(paths[-1])
    assert [guess.image for guess in predict(run, paths)] == paths


# What it cannot use.


def test_missing_files_and_folders_are_told_all_at_once(run, tmp_path, pictures):
    with pytest.raises(ValueError, match="these are no images") as raised:
        predict(run, [tmp_path / "absent.png", pictures[0][0], tmp_path])
    assert f"- {tmp_path / 'absent.png'}: no such file" in str(raised.value)
    assert f"- {tmp_path}: a folder" in str(raised.value)
    assert "0.png" not in str(raised.value)


@pytest.mark.parametrize("kind", ["grey", "colour"])
def test_what_is_no_image_is_named(run, tmp_path, tiny, pictures, kind):
    if kind == "colour":
        colours(run := tmp_path / "colours", torch.eye(3))
    (tmp_path / "words.jpg").write_text("not an image")
    (tmp_path / "torn.png").write_bytes(pictures[0][0].read_bytes()[:60])
    with pytest.raises(ValueError, match="cannot read 2") as raised:
        predict(run, [tmp_path / "words.jpg", pictures[0][0], tmp_path / "torn.png"])
    assert "words.jpg" in str(raised.value)
    assert "torn.png" in str(raised.value)


def test_no_checkpoint_is_told_what_would_be_one(tmp_path, pictures):
    for path, what in ((tmp_path / "absent", "does not exist; accepted"), (tmp_path, "no checkpoint in .*; accepted")):
        with pytest.raises(ValueError, match=what) as raised:
            predict(path, pictures[0])
        assert "checkpoint-NNNNNNNN" in str(raised.value)
    with pytest.raises(ValueError, match=r"0\.png is not a complete safetensors file"):
        predict(pictures[0][0], pictures[0])


@pytest.mark.parametrize("missing", ["model", "classes", "input"])
def test_a_checkpoint_that_does_not_say_what_it_is_is_told(run, pictures, missing):
    facts = {name: fact for name, fact in FACTS.items() if name != missing}
    write(run, 3, {}, {"facts": facts})
    with pytest.raises(ValueError, match=f"does not contain {missing} "):
        predict(run, pictures[0])
    write(run, 4, {}, None)
    with pytest.raises(ValueError, match=r"does not contain model .*, classes .*, input "):
        predict(run, pictures[0])


def test_weights_of_another_network_are_told(run, model, pictures):
    write(run, 3, model.state_dict(), {"facts": {**FACTS, "classes": ["one", "two"]}})
    with pytest.raises(ValueError, match=r"do not fit model 'small' with 2 classes: (.|\n)*9\.weight"):
        predict(run, pictures[0])


def test_a_shape_that_cannot_be_prepared_is_told(run, model, pictures):
    write(run, 3, model.state_dict(), {"facts": {**FACTS, "input": [3, 32, 32]}})
    with pytest.raises(ValueError, match=r"\(3, 32, 32\); predict prepares \(3, 224, 224\) and \(1, 28, 28\)"):
        predict(run, pictures[0])


def test_answers_of_another_shape_are_told(tmp_path, tiny, pictures):
    write(tmp_path / "run", 1, {}, {"facts": {**FACTS, "model": f"{tiny}:flat"}})
    with pytest.raises(ValueError, match=r"returns \(2, 784\) for 2 images; predict needs logits of shape \(2, 3\)"):
        predict(tmp_path / "run", pictures[0][:2])


def test_a_diverged_network_is_told(tmp_path, tiny, pictures):
    colours(tmp_path / "run", torch.eye(3) * torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        predict(tmp_path / "run", pictures[0][:1])


@pytest.mark.parametrize(("count", "top"), [(0, 3), (1, 0)])
def test_no_images_or_no_answers_wanted_is_told(run, pictures, count, top):
    with pytest.raises(ValueError, match=f"got {count} images and top={top}"):
        predict(run, pictures[0][:count], top)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("smal", "did you mean 'small'"),
        ("no_such_module:build", "No module named 'no_such_module'.*accepted: package.module:function"),
        ("tiny_networks:absent", "no attribute 'absent'.*accepted"),
        (":build", "cannot get model ':build'"),
        ("tiny_networks:number", "is a int, not a function"),
        ("tiny_networks:nothing", "gives a int; it must give a torch.nn.Module"),
    ],
)
def test_a_wrong_network_is_told(tiny, name, what):
    with pytest.raises(ValueError, match=what):
        network(name).build(3)
