"""Folder in, shards out: the same training to the bit; damaged shards are refused by name."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data import images
from paceline.data import shards as shard
from paceline.data.batches import batches
from paceline.data.decode import decode
from paceline.data.pack import pack
from paceline.data.sampler import Assignment
from photographs import SHARD_BYTES, lay, photo


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return lay(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def shards(photos, tmp_path) -> Path:
    pack(photos, tmp_path / "shards", shard_bytes=SHARD_BYTES)
    return tmp_path / "shards"


# The same training.


def test_training_from_shards_is_training_from_the_folder(photos, shards):
    assert len(list(shards.glob("*.array_record"))) > 4
    for packed, loose in zip(images.load(shards, seed=0), images.load(photos, seed=0), strict=True):
        assert packed.classes == loose.classes == ("ant", "bee", "cat")
        assert len(packed) == len(loose) > 0
        for index in range(len(loose)):
            assert packed.data(index) == loose.data(index)
        order = list(np.random.default_rng(0).permutation(len(loose)))
        for mine, theirs in zip(packed.fetch(order, 3), loose.fetch(order, 3), strict=True):
            assert torch.equal(mine, theirs)


def test_given_parts_are_kept(tmp_path):
    for at, (part, label) in enumerate((p, c) for p in ("train", "val") for c in "ab"):
        for i in range(2 + at):
            photo(tmp_path / "photos" / part / label / f"{i}.jpg", 10 * at + i)
    report = pack(tmp_path / "photos", tmp_path / "shards")
    assert (report.num_train, report.num_test, report.num_shards) == (5, 9, 2)
    train, test = images.load(tmp_path / "shards")
    assert train.fetch(range(5), 0)[1].tolist() == [0, 0, 1, 1, 1]
    assert test.fetch(range(9), 0)[1].tolist() == [0] * 4 + [1] * 5
    assert len(images.load(tmp_path / "photos")[1]) == 9


def test_shards_travel_to_other_processes_and_are_read_by_many_threads(shards):
    train, _ = images.load(shards)
    alone = train.fetch(range(len(train)), 1)[0]
    assert torch.equal(pickle.loads(pickle.dumps(train)).fetch(range(len(train)), 1)[0], alone)
    many, _ = images.load(shards, threads=8)
    assert torch.equal(many.fetch(range(len(train)), 1)[0], alone)
    wanted = alone[3].numpy().tobytes()
    if not (child := os.fork()):
        torch.set_num_threads(1)  # the teams of threads of the parent are not here
        os._exit(0 if train.fetch([3], 1)[0].numpy().tobytes() == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("packed", [False, True])
def test_processes_that_decode_give_the_same_pixels(photos, shards, packed):
    def rows(num_workers):
        train, _ = images.load(shards if packed else photos)
        made = batches(train, 10, 2, 3, Assignment(0, 2), workers=num_workers, start=(0, 1))
        return [batch.share(Assignment(0, 2)) for batch in made]

    for mine, theirs in zip(rows(0), rows(2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_few_files_are_open_at_a_time(shards, monkeypatch):
    monkeypatch.setattr(shard, "MAX_OPEN_FILES", 2)
    train, _ = images.load(shards, threads=1)
    before = len(os.listdir("/proc/self/fd"))
    for index in range(len(train)):
        train.data(index)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_size_makes_large_images_small_and_leaves_small_ones_alone(tmp_path):
    for name in ("a", "b"):
        photo(tmp_path / "photos" / name / "0.png", 1, (600, 300))
        photo(tmp_path / "photos" / name / "1.png", 2, (100, 60))
    pack(tmp_path / "photos", tmp_path / "shards", size=128, test_fraction=0.5)
    sizes = set()
    for part in images.load(tmp_path / "shards"):
        for index in range(len(part)):
            height, width, _ = decode(part.data(index)).shape
            sizes.add((width, height))
    assert sizes == {(256, 128), (100, 60)}
    with pytest.raises(ValueError, match="size is the short side in pixels"):
        pack(tmp_path / "photos", tmp_path / "other", size=0)


# Damaged shards.


def first(shards: Path) -> Path:
    return shards / "train-00001.array_record"


DAMAGES = {
    "shorter": lambda shards: os.truncate(first(shards), first(shards).stat().st_size - 1),
    "empty": lambda shards: os.truncate(first(shards), 0),
    "missing": lambda shards: first(shards).unlink(),
    "swapped": lambda shards: first(shards).write_bytes((shards / "test-00000.array_record").read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused_by_name(shards, damage):
    DAMAGES[damage](shards)
    with pytest.raises(ValueError, match=r"not those that were packed:\n- train-00001\.array_record: ") as caught:
        images.load(shards)
    assert str(caught.value).count("\n- ") == 1


def test_files_too_many_are_refused_by_name(shards):
    (shards / "train-00099.array_record").write_bytes(first(shards).read_bytes())
    with pytest.raises(ValueError, match=r"train-00099\.array_record: not in manifest"):
        images.load(shards)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"version": 1', '"version": 2', r"version 2, this paceline reads .* 1"),
        ('"bee"', '"bug"', "changed after packing"),
        ("{", "", "manifest.json"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(shards, old, new, told):
    text = (shards / "manifest.json").read_text()
    (shards / "manifest.json").write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=told):
        images.load(shards)


def test_no_flipped_byte_reaches_training_and_the_record_is_named(shards):
    """Flipped where they may lie: in records, in hashes, in the index."""
    whole, path = first(shards).read_bytes(), first(shards)
    train, _ = images.load(shards)
    before = json.loads((shards / "manifest.json").read_text())["parts"]["train"]["shards"][0]["records"]
    mine = range(before, before + train._starts[2] - train._starts[1])
    wanted = [train.data(index) for index in mine]
    where = np.flatnonzero(np.frombuffer(whole, np.uint8))  # a file of small records is mostly padding
    assert len(where) > 5_000
    told = 0
    for at in np.random.default_rng(0).choice(where, 150, replace=False):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"train-00001\.array_record: damaged"):
            shard.load(shards, verify=True)
        try:
            damaged, _ = images.load(shards)
            got = [damaged.data(index) for index in mine]
        except ValueError:
            told += 1
        else:
            assert got == wanted
    assert told > 100
    at = whole.index(wanted[1]) + 10
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    damaged, _ = images.load(shards)
    with pytest.raises(
        ValueError, match=r"cannot read 1 of 2 images:\n- record 1 of .*train-00001\.array_record: .*damaged"
    ):
        damaged.fetch(mine[:2], 0)
