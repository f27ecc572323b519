"""The newest checkpoint stays complete, whatever kills the writer and whatever error the disk returns."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

from disks import tmpfs
from paceline.checkpoint import atomic_write, checkpoint, export
from paceline.checkpoint.checkpoint import CheckpointError, read, read_newest, write

WEIGHTS = {"w": torch.arange(2048.0), "b": torch.ones(3)}
FILES = (checkpoint.WEIGHTS, checkpoint.STATE, checkpoint.TREE)


def state(turn):
    return {"turn": turn, "moments": [torch.full((2048,), float(turn))]}


def names(run):
    return sorted(path.name for path in run.iterdir())


# Death.


def killed(*arguments):
    script = Path(__file__).parents[1] / "support" / "scripts" / "killed.py"
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.dear("500")
@pytest.mark.parametrize("num_kills", [25, 500])
def test_sigkill_at_random_moments_never_leaves_less_than_what_was_reported(tmp_path, num_kills):
    """With synchronous and with asynchronous writers."""
    counts = killed(str(tmp_path / "run"), "0", str(num_kills))
    assert counts["kills"] == num_kills
    assert counts["in the middle"] >= num_kills // 5, "the kills came between writes, and tested nothing"


def test_sigkill_before_each_change_to_the_file_system_never_leaves_less(tmp_path):
    """New and replaced steps: an interruption at each point of writing, renaming and removing."""
    counts = killed(str(tmp_path / "run"))
    assert counts["kills"] >= 30
    assert counts["in the middle"] >= 20


def test_everything_is_on_the_disk_before_it_has_its_name_and_before_the_old_one_goes(tmp_path, monkeypatch):
    events = []
    fsync, rename, rmtree = os.fsync, os.replace, shutil.rmtree

    def note_sync(handle):
        fsync(handle)
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))

    def note_rename(source, target):
        rename(source, target)
        events.append(("rename", Path(target).name))

    def note_removal(path, **options):
        rmtree(path, **options)
        events.append(("remove", Path(path).name))

    run = tmp_path / "run"
    write(run, 1, WEIGHTS, None)
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    monkeypatch.setattr(shutil, "rmtree", note_removal)
    write(run, 2, WEIGHTS, None, keep=1)
    assert events == [
        *(("sync", name) for name in FILES),
        ("sync", "checkpoint-00000002.part"),
        ("rename", "checkpoint-00000002"),
        ("sync", "run"),
        ("rename", "checkpoint-00000001.part"),
        ("remove", "checkpoint-00000001.part"),
    ]
    events.clear()
    write(run, 2, WEIGHTS, None)
    export.export(run / "w.safetensors", WEIGHTS)
    assert events == [
        *(("sync", name) for name in FILES),
        ("sync", "checkpoint-00000002.part"),
        ("rename", "checkpoint-00000002.old"),
        ("rename", "checkpoint-00000002"),
        ("sync", "run"),
        ("rename", "checkpoint-00000002.old.part"),
        ("remove", "checkpoint-00000002.old.part"),
        ("sync", "w.safetensors.part"),
        ("rename", "w.safetensors"),
        ("sync", "run"),
    ]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    write(tmp_path, 1, WEIGHTS, state(1))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic_write, "sync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 2, WEIGHTS, state(2))
    assert names(tmp_path) == ["checkpoint-00000001"]


# Others.


def test_what_dead_writers_left_is_cleared_and_nothing_else(tmp_path):
    write(tmp_path, 1, WEIGHTS, state(1))
    for name in ("checkpoint-00000001.part", "checkpoint-00000009.part", "theirs.part", "checkpoint-00000001.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoint.TREE).write_text("torn")
    assert read_newest(tmp_path).state["turn"] == 1
    write(tmp_path, 2, WEIGHTS, state(2))
    assert names(tmp_path) == ["checkpoint-00000001", "checkpoint-00000002", "theirs.part"]


def test_a_replacement_cut_short_is_still_the_newest(tmp_path):
    write(tmp_path, 1, WEIGHTS, state(1))
    write(tmp_path, 2, WEIGHTS, state(2)).rename(tmp_path / "checkpoint-00000002.old")
    assert read_newest(tmp_path).state["turn"] == 2
    write(tmp_path, 3, WEIGHTS, state(3))
    assert names(tmp_path) == ["checkpoint-00000002", "checkpoint-00000003"]


def test_two_writers_take_turns(tmp_path):
    started = threading.Event()

    def work():
        started.set()
        write(tmp_path, 1, WEIGHTS, state(1))

    with atomic_write.locked(tmp_path):
        thread = threading.Thread(target=work)
        thread.start()
        started.wait(10)
        thread.join(0.2)
        assert thread.is_alive()
        assert names(tmp_path) == []
    thread.join(30)
    assert names(tmp_path) == ["checkpoint-00000001"]


def test_a_writer_that_never_ends_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_write, "WAIT_S", 0.1)
    with (
        atomic_write.locked(tmp_path),
        pytest.raises(CheckpointError, match="another process has held the folder's lock for"),
    ):
        write(tmp_path, 1, WEIGHTS, None)


# Refusals by the system.


def refused(run, turn, step, number):
    """Whether a write raised the expected error; if it did not, asserts that it succeeded."""
    before, error, usage, usages = read_newest(run), None, shutil.disk_usage, []

    def disk_usage(place):
        usages.append((place, usage(place)))  # others write to the same disk meanwhile
        return usages[-1][1]

    try:
        with mock.patch.object(shutil, "disk_usage", disk_usage):
            path = write(run, step, WEIGHTS, state(turn))
    except CheckpointError as refusal:
        error = refusal
    if error:
        assert error.errno == number, error
        text = str(error)
        assert f"checkpoint of step {step} to {run}" in text
        needed = sum(file.stat().st_size for file in before.path.iterdir())  # the same, but for the turn
        ((place, seen),) = usages
        assert place.stat().st_dev == run.stat().st_dev
        assert f"needs {needed:,} bytes, {seen.free:,} are free" in text
        assert f"{before.path.name} is untouched" in text
        after = read_newest(run)
        assert (after.path, after.state["turn"], after.damaged) == (before.path, before.state["turn"], ())
        assert not [name for name in names(run) if name.endswith((".part", ".old"))]
        return True
    assert read(path).state["turn"] == turn
    return False


@pytest.mark.dear
@pytest.mark.parametrize("step", [2, 1])
def test_a_full_disk_at_every_level_is_told_and_the_previous_one_stands(tmp_path, step):
    page, outcomes = 4096, []
    with tmpfs(tmp_path / "disk", "size=256k") as disk:
        run = disk / "run"
        for num_free in range(9):
            shutil.rmtree(run, ignore_errors=True)
            (disk / "ballast").unlink(missing_ok=True)
            write(run, 1, WEIGHTS, state(1))
            free = os.statvfs(disk).f_bavail
            (disk / "ballast").write_bytes(b"\0" * page * (free - num_free))
            assert os.statvfs(disk).f_bavail == num_free
            outcomes.append(refused(run, 2, step, errno.ENOSPC))
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes[0]
    assert not outcomes[-1]


@pytest.mark.parametrize("num_inodes", range(1, 6))
def test_a_disk_without_room_for_more_names_is_told(tmp_path, num_inodes):
    # the disk, the run and the four of its first checkpoint come before
    with tmpfs(tmp_path / "disk", f"size=1m,nr_inodes={6 + num_inodes}") as disk:
        write(disk / "run", 1, WEIGHTS, state(1))
        assert refused(disk / "run", 2, 2, errno.ENOSPC) == (os.statvfs(disk).f_files - 6 < 4)


@pytest.mark.parametrize("limit", [*range(0, 9000, 1000), 8192 + 64, 8192 + 256])
def test_a_file_refused_at_any_length_is_told(tmp_path, limit):
    """The limit on file sizes represents quotas and full disks, which a test cannot mount."""
    write(tmp_path, 1, WEIGHTS, state(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        was_refused = refused(tmp_path, 2, 2, errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert was_refused == (limit < 8192 + 200)


def test_a_read_only_disk_is_told(tmp_path):
    with tmpfs(tmp_path / "disk", "size=256k") as disk:
        write(disk / "run", 1, WEIGHTS, state(1))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=10)
        assert refused(disk / "run", 2, 2, errno.EROFS)
        with pytest.raises(CheckpointError, match=r"Read-only.*there is no earlier one"):
            write(disk / "new", 1, WEIGHTS, None)
        with pytest.raises(CheckpointError, match=r"cannot write .* Read-only"):
            export.export(disk / "w.safetensors", WEIGHTS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_told(tmp_path):
    write(tmp_path, 1, WEIGHTS, state(1))
    tmp_path.chmod(0o555)
    try:
        assert refused(tmp_path, 2, 2, errno.EACCES)
    finally:
        tmp_path.chmod(0o755)


def test_a_run_that_is_a_file_is_told(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(CheckpointError, match=r"to .*run: .*there is no earlier one"):
        write(tmp_path / "run", 1, WEIGHTS, None)
