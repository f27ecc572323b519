"""Broken images are all listed before packing, or left out and reported; a folder is checked once."""

from __future__ import annotations

import pytest
import torch

from paceline.data import images
from paceline.data.pack import pack
from photographs import SHARD_BYTES, add_broken, lay, photo


@pytest.fixture
def broken(tmp_path):
    """A folder with broken images, and the expected error of each."""
    root = lay(tmp_path / "photos")
    return root, add_broken(root)


def test_all_broken_images_are_named_before_anything_is_packed(broken, tmp_path):
    root, reasons = broken
    with pytest.raises(ValueError, match=r"5 of 40 images in .*photos cannot be read") as caught:
        pack(root, tmp_path / "shards")
    lines = str(caught.value).splitlines()
    for name, reason in reasons.items():
        assert any(line.startswith(f"- {name}: ") and reason in line for line in lines)
    assert "skip_broken" in lines[-1]
    assert not list((tmp_path / "shards").glob("*.array_record"))
    with pytest.raises(ValueError, match="was not finished; pack again"):
        images.load(tmp_path / "shards")


def test_broken_images_are_left_out_and_told_and_the_training_is_that_of_the_folder(broken, tmp_path, monkeypatch):
    root, reasons = broken
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = pack(root, tmp_path / "shards", skip_broken=True, shard_bytes=SHARD_BYTES)
    assert report.skipped.keys() == reasons.keys()
    assert all(reasons[name] in reason for name, reason in report.skipped.items())
    assert report.num_train + report.num_test == 35
    loose = images.load(root, skip_broken=True)
    assert loose[0].skipped == report.skipped
    for packed, part in zip(images.load(tmp_path / "shards"), loose, strict=True):
        rows = range(len(part))
        assert all(torch.equal(a, b) for a, b in zip(packed.fetch(rows, 2), part.fetch(rows, 2), strict=True))


def test_where_the_answer_cannot_be_kept_it_is_given_all_the_same(broken, tmp_path, monkeypatch):
    root, reasons = broken
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert images.load(root, skip_broken=True)[0].skipped.keys() == reasons.keys()


def test_a_folder_is_checked_once_per_state_of_it(broken, tmp_path, monkeypatch):
    root, _ = broken
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seen = []

    def load(**options):
        seen.clear()
        return images.load(root, skip_broken=True, progress=lambda *step: seen.append(step), **options)

    load()
    assert seen == [("check", 40, 40)]
    skipped = load(test_fraction=0.5)[0].skipped
    assert seen == []
    assert len(skipped) == 5
    (root / "ant" / "empty.png").unlink()
    assert len(load()[0].skipped) == 4
    assert seen


def test_a_class_of_broken_images_alone_is_told(tmp_path):
    for name in ("a", "b"):
        for i in range(3):
            photo(tmp_path / "photos" / name / f"{i}.jpg", i)
    for i in range(3):
        (tmp_path / "photos" / "b" / f"{i}.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match=r"without 3 broken images.*\n- it has classes without images: b"):
        pack(tmp_path / "photos", tmp_path / "shards", skip_broken=True)


def test_a_long_list_is_cut_and_the_rest_counted(tmp_path):
    for name in ("a", "b"):
        photo(tmp_path / name / "good.jpg")
        for i in range(30):
            (tmp_path / name / f"{i:02}.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match=r"60 of 62 images(.*\n){21}\.\.\. and 40 more"):
        pack(tmp_path, tmp_path.with_name("shards"))
