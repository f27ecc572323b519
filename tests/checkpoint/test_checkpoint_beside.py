"""An asynchronous checkpoint is identical to a synchronous one; an error of the writer is raised once."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from disks import tmpfs
from launching import environment
from paceline.checkpoint import async_writer, atomic_write
from paceline.checkpoint.async_writer import StagingBuffers
from paceline.checkpoint.checkpoint import CheckpointError, read_newest
from paceline.errors import NotFinite
from paceline.report import record


def training(folder=None, engine="sequential"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return paceline.join(model, optimizer, F.cross_entropy, batch_size=8, engine=engine, folder=folder, keep=100)


def step(pace):
    dice = torch.Generator().manual_seed(pace.num_steps)
    pace.step((torch.randn(8, 12, generator=dice), torch.arange(8) % 3))


def steps(run):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in run.glob("checkpoint-*"))


def files(path):
    """The content of the checkpoints, without the number of the join that wrote them."""
    found = {file.name: file.read_bytes() for file in path.iterdir()}
    return found | {"checkpoint.json": re.sub(rb'"(join|sha256)": ("[0-9a-f]*"|\d+)', b"", found["checkpoint.json"])}


def idle():
    for thread in threading.enumerate():
        if thread.name == "paceline writer":
            thread.join(30)


@pytest.fixture
def hold():
    """``hold(run)``: blocks all writes to the folder, until ``hold.close()``."""

    class Hold(contextlib.ExitStack):
        def __call__(self, run):
            run.mkdir(exist_ok=True)
            self.enter_context(atomic_write.locked(run))

    with Hold() as held:
        yield held
    idle()


@pytest.mark.parametrize("engine", ["sequential", "threads:2", "replicas:2"])
def test_it_is_byte_for_byte_what_waiting_would_have_written(tmp_path, hold, engine):
    """The write is blocked until two more steps are done."""
    with training(tmp_path / "waited", engine) as pace:
        for _ in range(9):
            step(pace)
            pace.save()
    with training(tmp_path / "beside", engine) as pace:
        for _ in range(3):
            step(pace)
            hold(pace.folder)
            pace.save(wait=False)
            step(pace), step(pace)
            assert pace.num_steps - 2 not in steps(pace.folder)
            hold.close()
            idle()  # or the next hold might come before it
    assert steps(tmp_path / "beside") == [1, 4, 7]
    for path in (tmp_path / "beside").glob("checkpoint-*"):
        assert files(path) == files(tmp_path / "waited" / path.name)


def test_the_next_one_waits_for_the_last(tmp_path, hold):
    with training(tmp_path) as pace:
        step(pace)
        hold(tmp_path)
        pace.save(wait=False)
        step(pace)
        thread = threading.Thread(target=pace.save, kwargs={"wait": False})
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        hold.close()
        thread.join(30)
    assert steps(tmp_path) == [1, 2]
    events = [event for event in record.read(tmp_path) if event["event"] == "checkpoint"]
    assert [event["step"] for event in events] == [1, 2]
    assert all(event["seconds"] > 0 and event["write_seconds"] > 0 for event in events)


def test_restore_waits_for_it(tmp_path, hold):
    with training(tmp_path) as pace:
        step(pace)
        hold(tmp_path)
        pace.save(wait=False)
        threading.Timer(0.3, hold.close).start()
        assert pace.restore()


def test_a_snapshot_takes_memory_once():
    copies = StagingBuffers()
    tensors = {
        "a": nn.Parameter(torch.randn(3, 5)),
        "b": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "c": torch.tensor(1),
        "d": torch.randn(4, 6).T,
        "e": torch.ones(2, 2).bfloat16(),
        "f": torch.empty(0, 3),
    }
    places = {}
    for turn in range(3):
        for tensor in tensors.values():
            tensor.detach().fill_(turn)
        made = copies.stage(tensors)
        assert all(made[name].dtype == tensor.dtype for name, tensor in tensors.items())
        assert all(torch.equal(made[name], tensor) for name, tensor in tensors.items())
        assert not any(place.requires_grad for place in made.values())
        here = {name: place.data_ptr() for name, place in made.items()}
        assert places in ({}, here)
        places = here
    tensors["a"].detach().fill_(7)
    assert not (made["a"] == 7).any()
    tensors["c"] = torch.zeros(2, 2)
    assert torch.equal(copies.stage(tensors)["c"], tensors["c"])


# What goes wrong.


@pytest.fixture
def full(tmp_path):
    """A run with one checkpoint on a disk without room for another."""
    with tmpfs(tmp_path / "disk", "size=256k") as disk, training() as pace:
        step(pace)
        pace.save(disk / "run")
        free = os.statvfs(disk)
        (disk / "ballast").write_bytes(bytes(free.f_bavail * free.f_bsize))
        step(pace)
        yield pace, disk / "run"


def many_steps(pace):
    for _ in range(100_000):
        step(pace)


FULL = r"checkpoint of step 2 .*No space left on device.*checkpoint-00000001 is untouched"


def test_the_next_step_tells_it_once_and_has_been_made(full):
    pace, run = full
    pace.save(run, wait=False)
    before = pace.num_steps
    with pytest.raises(CheckpointError, match=FULL):
        many_steps(pace)
    assert pace.num_steps > before
    made = pace.num_steps
    for _ in range(3):
        step(pace)
    assert pace.num_steps == made + 3
    found = read_newest(run)
    assert (found.step, found.damaged) == (1, ())
    (run.parent / "ballast").unlink()
    pace.save(run, wait=False)
    assert pace.restore(run)
    assert pace.num_steps == made + 3


@pytest.mark.parametrize("what", ["save", "save beside", "restore"])
def test_what_comes_before_the_next_step_tells_it(full, what):
    pace, run = full
    calls = {
        "save": lambda: pace.save(run),
        "save beside": lambda: pace.save(run, wait=False),
        "restore": lambda: pace.restore(run),
    }
    pace.save(run, wait=False)
    with pytest.raises(CheckpointError, match=FULL):
        calls[what]()
    step(pace)
    step(pace)


def ends(folder, run, error=None):
    """A run whose last operation is a save."""
    with training(folder) as pace:
        step(pace)
        pace.save(run, wait=False)
        if error:
            raise error


def test_the_end_tells_it(full, capsys):
    _, run = full
    with pytest.raises(CheckpointError, match=r"step 1 .*No space left"):
        ends(None, run.parent / "other")
    assert capsys.readouterr().err == ""


def test_an_end_by_another_error_tells_it_in_a_line(full, capsys):
    _, run = full
    with pytest.raises(ZeroDivisionError):
        ends(None, run.parent / "other", ZeroDivisionError())
    output = capsys.readouterr().err
    assert output.startswith("paceline: cannot write the checkpoint of step 1 ")
    assert output.count("\n") == 1


def fail_to_save(run, hold):
    with training(run) as pace:
        step(pace)
        hold(run)
        pace.save(wait=False)
        threading.Timer(0.3, hold.close).start()
        pace.step((torch.full((8, 12), math.nan), torch.arange(8) % 3))


def test_it_is_waited_for_when_the_loss_is_not_finite(tmp_path, hold):
    with pytest.raises(NotFinite):
        fail_to_save(tmp_path, hold)
    assert read_newest(tmp_path).step == 1


def test_a_second_ctrl_c_does_not_wait(tmp_path, hold, capsys):
    hold(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        ends(tmp_path, tmp_path, KeyboardInterrupt())
    assert steps(tmp_path) == []
    assert capsys.readouterr().err == ""


def test_a_disk_that_does_not_answer_is_told(tmp_path, hold, monkeypatch):
    monkeypatch.setattr(async_writer, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(async_writer, "SLOWEST_BYTES_PER_S", math.inf)
    message = r"the checkpoint of step 1 in .* is not on the disk after 0 s; earlier checkpoints are untouched"
    pace = training(tmp_path)
    step(pace)
    hold(tmp_path)
    pace.save(wait=False)
    with pytest.raises(CheckpointError, match=message):
        pace.save()
    step(pace)
    with pytest.raises(CheckpointError, match=message):
        pace.close()


SCRIPT = """
import sys, torch, paceline
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pace = paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=2, engine="sequential")
pace.step((torch.ones(2, 4), torch.zeros(2).long()))
pace.save(sys.argv[1], wait=False)
print("begun", flush=True)
"""


@pytest.mark.dear
def test_a_script_that_simply_ends_waits_for_it(tmp_path, hold):
    hold(tmp_path)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        assert process.stdout.readline() == "begun\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        hold.close()
        assert process.wait(60) == 0
    assert read_newest(tmp_path).step == 1
