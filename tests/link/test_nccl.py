"""NCCL takes what lies on a GPU, gloo the rest; waits have deadlines, and a broken lane is given up."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.link import nccl
from paceline.link.nccl import Group, Work


def test_without_a_gpu_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="PACELINE_LINK=nccl needs a GPU that torch sees"):
        nccl.Link(0, 2, "127.0.0.1", 1)


class Noting:
    def __init__(self):
        self.calls, self.aborted = [], 0

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            return Never()

        return call

    def abort(self):
        self.aborted += 1
        raise RuntimeError("the communicator is broken")


class Never:
    def is_completed(self):
        return False


def test_each_operation_goes_where_its_tensors_lie_and_the_gpus_group_is_made_when_it_is_needed():
    host, made = Noting(), []

    def make():
        made.append(Noting())
        return made[-1]

    group = Group(host, make, lambda tensor: tensor.numel() > 3)
    options, small, large = dist.BroadcastOptions(), torch.ones(2), torch.ones(8)
    for tensor in (small, large):
        group.allreduce([tensor], options)
        group.allgather([[tensor]], [tensor])
        group.broadcast([tensor], options)
        group.send([tensor], 1, 0)
        group.recv([tensor], 1, 0)
        assert len(made) == (tensor is large)
    assert host.calls == made[0].calls == ["allreduce", "allgather", "broadcast", "send", "recv"]
    group.abandon()
    assert made[0].aborted == 1
    Group(host, make).abandon()
    assert len(made) == 1


def test_a_wait_ends_at_its_deadline_also_where_the_gpu_waits_for_ever():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="not yet"):
        Work(Never()).wait(timedelta(seconds=0.2))
    assert 0.2 <= time.monotonic() - start < 2.0


def test_what_went_wrong_on_the_gpu_is_raised():
    class Broken:
        def is_completed(self):
            return True

        def wait(self):
            raise RuntimeError("unhandled system error")

    with pytest.raises(RuntimeError, match="unhandled system error"):
        Work(Broken()).wait(timedelta(seconds=1))
