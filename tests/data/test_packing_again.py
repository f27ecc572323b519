"""Repeated packing: returns at once if nothing changed, resumes after an interruption, and gives the same bytes."""

from __future__ import annotations

import io
import os
import resource
import signal
import time
from pathlib import Path

import pytest
from PIL import Image

from paceline.data import images
from paceline.data.pack import pack
from photographs import SHARD_BYTES, add_broken, files, lay, photo


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return lay(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def shards(photos, tmp_path) -> Path:
    pack(photos, tmp_path / "shards", shard_bytes=SHARD_BYTES)
    return tmp_path / "shards"


@pytest.fixture
def broken(tmp_path):
    """A folder with broken images, and the expected error of each."""
    root = lay(tmp_path / "photos")
    return root, add_broken(root)


def test_packing_again_is_done_at_once_and_something_else_is_not_overwritten(photos, shards):
    before = files(shards)
    seen = []
    report = pack(photos, shards, shard_bytes=SHARD_BYTES, progress=lambda *step: seen.append(step))
    assert seen == []
    assert report.num_train + report.num_test == 33
    with pytest.raises(ValueError, match="of another folder, of an earlier state of it, or with other settings"):
        pack(photos, shards, shard_bytes=SHARD_BYTES, test_fraction=0.5)
    with pytest.raises(ValueError, match="contains other files"):
        pack(photos, shards.parent)
    with pytest.raises(ValueError, match="inside the folder that is packed"):
        pack(photos, photos / "ant")
    assert files(shards) == before


def test_progress_counts_every_image(photos, tmp_path):
    seen = []
    pack(photos, tmp_path / "shards", progress=lambda *step: seen.append(step))
    assert seen == [("check", 33, 33), *(("pack", i + 1, 33) for i in range(33))]


def packed_until(root: Path, out: Path, write_end: int, steps: int) -> None:
    """Packs in a child process: after ``steps`` images it waits to be killed."""
    left = iter(range(steps))

    def slowly(*step):
        next(left)
        os.write(write_end, b".")
        if not left.__length_hint__():
            time.sleep(100)

    try:
        pack(root, out, skip_broken=True, shard_bytes=SHARD_BYTES, progress=slowly)
    except KeyboardInterrupt:
        os._exit(130)
    os._exit(0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_pack_goes_on_and_ends_with_the_same_bytes(broken, tmp_path, how):
    root, _ = broken
    pack(root, tmp_path / "whole", skip_broken=True, shard_bytes=SHARD_BYTES)
    out = tmp_path / "shards"
    kept = []
    for steps in (1, 4, 11, 18):
        read_end, write_end = os.pipe()
        if not (packing := os.fork()):
            packed_until(root, out, write_end, steps)
        for _ in range(steps):
            os.read(read_end, 1)
        os.kill(packing, how)
        assert os.waitpid(packing, 0)[1] == (how if how == signal.SIGKILL else 130 << 8)
        os.close(read_end)
        os.close(write_end)
        with pytest.raises(ValueError, match="was not finished"):
            images.load(out)
        kept.append({path.name: path.stat().st_mtime_ns for path in out.glob("*.array_record")})
    assert kept[-1]
    assert kept[0].items() <= kept[1].items() <= kept[2].items() <= kept[3].items()  # none was written again
    pack(root, out, skip_broken=True, shard_bytes=SHARD_BYTES)
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.dear
def test_a_full_disk_is_told_and_the_pack_goes_on_when_there_is_room(photos, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # writing beyond fails, as on a full disk
    try:
        with pytest.raises(OSError, match=r"packing stopped at .*train-00000\.array_record: .*too large.*pack again"):
            pack(photos, tmp_path / "shards", shard_bytes=SHARD_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["packing.jsonl"]
    pack(photos, tmp_path / "shards", shard_bytes=SHARD_BYTES)
    pack(photos, tmp_path / "whole", shard_bytes=SHARD_BYTES)
    assert files(tmp_path / "shards") == files(tmp_path / "whole")


def test_a_folder_changed_since_the_interruption_is_packed_anew(broken, tmp_path):
    root, _ = broken
    with pytest.raises(ValueError, match="cannot be read"):
        pack(root, tmp_path / "shards")
    (tmp_path / "shards" / "train-00050.array_record").write_bytes(b"of an earlier state")
    photo(root / "ant" / "new.jpg", 5)
    pack(root, tmp_path / "shards", skip_broken=True)
    pack(root, tmp_path / "whole", skip_broken=True)
    assert files(tmp_path / "shards") == files(tmp_path / "whole")


def test_thousands_of_tiny_files_cost_little_each(tmp_path):
    tiny = io.BytesIO()
    Image.new("RGB", (8, 8), (9, 99, 199)).save(tiny, "JPEG")
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(1000):
            (tmp_path / "photos" / name / f"{i}.jpg").write_bytes(tiny.getvalue())
    start = time.process_time()
    report = pack(tmp_path / "photos", tmp_path / "shards")
    assert time.process_time() - start < 4  # 2 ms each; it is about 0.2
    assert report.num_train + report.num_test == 2000
