"""The embedded sample is complete, balanced and normalised."""

import hashlib
import re
from importlib.resources import files

import pytest
import torch

from paceline.data import sample


@pytest.fixture(scope="module")
def parts():
    return sample.load()


@pytest.mark.parametrize(("part", "num_each"), [(0, 2000), (1, 500)])
def test_every_class_has_as_many_images(parts, part, num_each) -> None:
    source = parts[part]
    images, labels = source.fetch(range(len(source)), 0)
    assert images.shape == (3 * num_each, 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert torch.bincount(labels).tolist() == [num_each] * len(source.classes)


def test_training_images_have_mean_0_and_deviation_1(parts) -> None:
    train, _ = parts
    images = train.fetch(range(len(train)), 0)[0].double()
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("part", [0, 1])
def test_values_are_bytes_scaled_and_shifted(parts, part) -> None:
    images, _ = parts[part].fetch(range(len(parts[part])), 0)
    grey = (images * sample.STD + sample.MEAN) * 255
    torch.testing.assert_close(grey, grey.round(), atol=1e-3, rtol=0)
    assert grey.min().round() == 0
    assert grey.max().round() == 255


def test_training_and_test_images_are_not_the_same(parts) -> None:
    train, test = ({image.numpy().tobytes() for image in part.fetch(range(len(part)), 0)[0]} for part in parts)
    assert not train & test


def test_a_sample_is_the_same_in_any_batch_and_epoch(parts) -> None:
    train, _ = parts
    images, labels = train.fetch([7, 5999, 0], 0)
    for row, index in enumerate([7, 5999, 0]):
        alone, label = train.fetch([index], 3)
        assert torch.equal(alone[0], images[row])
        assert label[0] == labels[row]


def test_no_indices_give_an_empty_batch(parts) -> None:
    images, labels = parts[0].fetch([], 0)
    assert images.shape == (0, 1, 28, 28)
    assert labels.shape == (0,)


def test_fetched_images_may_be_changed_in_place(parts) -> None:
    train, _ = parts
    images, labels = train.fetch([1, 2], 0)
    kept = images.clone(), labels.clone()
    images.zero_()
    labels.fill_(-1)
    again = train.fetch([1, 2], 0)
    assert torch.equal(again[0], kept[0])
    assert torch.equal(again[1], kept[1])


def test_the_files_are_those_that_the_readme_names() -> None:
    folder = files("paceline.train") / "sample"
    rows = re.findall(r"`(\w+\.npz)`.*`([0-9a-f]{64})`", (folder / "README.md").read_text())
    assert {name for name, _ in rows} == {"train.npz", "test.npz"}
    for name, digest in rows:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
