"""The processes of a node find each other within a deadline, or each says what is wrong, in words that help."""

import os
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.engine.compute.gradient_hooks import Backward
from paceline.engine.compute.input_snapshot import solidify
from paceline.engine.node import local_group as crews
from paceline.engine.node.local_control import FollowerControl, LeaderControl
from paceline.engine.node.local_group import LocalGroup, LocalGroupError
from paceline.engine.node.shared_memory import SharedBuffers
from paceline.errors import LinkError
from paceline.exchange.flow.control import Control
from paceline.link import memory


def meet(size, work=lambda local_group: None, name=None, ranks=None, sizes=None):
    """One thread per local rank; what each returned or raised, in order."""
    name = name or f"test-{os.getpid()}-{time.monotonic_ns()}"
    results = [None] * size

    def one(i):
        try:
            local_group = LocalGroup((ranks or range(size))[i], (sizes or [size] * size)[i], name)
        except BaseException as error:
            results[i] = error
            return
        try:
            results[i] = work(local_group)
        except BaseException as error:
            results[i] = error
        finally:
            local_group.close()

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("size", [1, 2, 5])
def test_everyone_hears_everyones_bytes(size):
    bodies = [os.urandom(n) for n in (0, 1, 3 * crews.MESSAGE_BYTES + 7, 40, crews.MESSAGE_BYTES - 1)][:size]
    for got in meet(size, lambda local_group: local_group.all_gather_bytes(bodies[local_group.rank], "testing")):
        assert got == bodies


def test_who_joins_again_at_once_does_not_meet_those_who_are_still_joining():
    name = f"test-{os.getpid()}-again"

    def work(local_group):
        local_group.close()
        again = LocalGroup(local_group.rank, local_group.size, name)
        again.barrier("testing")
        again.close()
        return True

    assert meet(5, work, name) == [True] * 5


def test_memory_is_shared_and_zero():
    def work(local_group):
        memory = local_group.shared_memory(12)
        assert (
            bytes(memory) in (bytes(12), bytes([0, 1, 0, *[0] * 9]), bytes([0, 1, 2, *[0] * 9]))
            or local_group.rank == 0
        )
        local_group.barrier("testing")
        memory[local_group.rank] = local_group.rank
        local_group.barrier("testing")
        return bytes(memory)

    assert meet(3, work) == [bytes([0, 1, 2] + [0] * 9)] * 3


@pytest.mark.parametrize(
    ("ranks", "sizes", "words"),
    [
        ((0, 1, 1), (3, 3, 3), "two processes of this node say they are local rank 1; start each"),
        ((0, 7), (2, 8), "says LOCAL_WORLD_SIZE=8, local rank 0 says 2; start each"),
        ((0, 5), (2, 2), "says it is local rank 5 of 2; they count from 0 to 1; start each"),
    ],
)
def test_wrong_ranks_are_named(ranks, sizes, words):
    for error in meet(len(ranks), ranks=ranks, sizes=sizes):
        assert isinstance(error, LocalGroupError)
        assert words.removesuffix("; start each") in str(error)


def test_a_stranger_who_says_nothing_or_nonsense_is_sent_away():
    name = f"test-{os.getpid()}-strangers"
    strangers = []

    def knock():
        for hello in (b"", b"h", b"x" * 9, b"h" + struct.pack("<II", 1, 2) + b"more"):
            while True:
                line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                try:
                    line.connect(f"\0paceline-{name}")
                    break
                except ConnectionRefusedError:
                    line.close()
                    time.sleep(0.01)
            if hello:
                line.send(hello)
            else:
                line.close()
            strangers.append(line)

    leader = []
    host = threading.Thread(target=lambda: leader.append(LocalGroup(0, 2, name)), daemon=True)
    host.start()
    knock()
    follower = LocalGroup(1, 2, name)
    host.join(30.0)
    assert leader[0].lines.keys() == {1}
    for one in (*strangers, follower, leader[0]):
        one.close()


def test_waiting_has_an_end(monkeypatch):
    monkeypatch.setenv("PACELINE_RENDEZVOUS_TIMEOUT_S", "0.2")
    start = time.monotonic()
    (alone,) = meet(1, ranks=[0], sizes=[3])
    assert "waited 0 s for local ranks [1, 2]; were all started" in str(alone)
    (lost,) = meet(1, ranks=[1], sizes=[2])
    assert "local rank 1 of 2 found no local rank 0" in str(lost)
    assert all(str(error).endswith("longer, give all PACELINE_RENDEZVOUS_TIMEOUT_S") for error in (alone, lost))
    assert time.monotonic() - start < 5


def test_a_name_in_use_is_named():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind("\0paceline-taken")
        (error,) = meet(1, name="taken", sizes=[2])
    assert "already uses the name 'taken'" in str(error)


@pytest.mark.parametrize("dies", [0, 1])
def test_death_while_sharing_memory_is_told(dies):
    def work(local_group):
        if local_group.rank == dies:
            return None
        if local_group.rank == 0:
            local_group.barrier("testing")
        return local_group.shared_memory(10)

    results = meet(2, work)
    assert isinstance(results[1 - dies], LinkError)
    assert f"lost local rank {dies}" in str(results[1 - dies])


def test_the_last_word_is_heard_over_a_reset():
    """Local rank 0 gives up with another's message unread, which resets that line."""

    def work(local_group):
        if local_group.rank:
            local_group.send(0, b"b")
            local_group.send(0, b"b")
            return local_group.expect(0, b"b", "testing")
        local_group.expect(1, b"b", "testing")
        local_group.broadcast_error(LocalGroupError("the disk is full"))
        return None

    assert str(meet(2, work)[1]) == "the disk is full"


class Odd(nn.Module):
    """An expanded buffer, and one that forward puts another tensor in the place of."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.register_buffer("count", torch.zeros(2))


def test_what_a_node_does_not_share_is_sent_to_its_processes():
    """Buffers that are expanded, or replaced by others of another size, and any tensor besides the weights."""

    def work(local_group):
        model = Odd()
        solidify(model)
        places = SharedBuffers(local_group, Backward(model).buckets, dict(model.named_parameters()))
        weight = places.weight("layer.weight")
        assert places.hold(weight)
        assert not any(map(places.hold, model.buffers()))
        relay = SimpleNamespace(
            local_group=local_group,
            alone=True,
            not_shared=lambda given: [each for each in given if not places.hold(each)],
        )
        plain = Control(memory.Members(memory.world(1)[0]))
        control = (LeaderControl, FollowerControl)[local_group.rank](plain, relay)
        model.count = torch.arange(3) + local_group.rank
        model.wide.add_(local_group.rank)
        if local_group.rank == 0:
            weight.fill_(7.0)
        control.broadcast(
            [*model.buffers(), weight, torch.zeros(0), half := torch.full((2,), 1.5 + local_group.rank).half()]
        )
        if local_group.rank:
            with pytest.raises(ValueError, match="local rank 0 has 8 bytes of buffers and this process 12"):
                control.broadcast([torch.zeros(3)])
        else:
            local_group.all_gather_bytes(control._with_changes(bytes(8)), "spreading")
        return model.wide.tolist(), model.count.tolist(), half.tolist(), weight.mean().item()

    assert meet(2, work) == [([1.0] * 4, [0, 1, 2], [1.5, 1.5], 7.0)] * 2


def test_who_sends_to_one_that_has_left_says_so_in_words():
    """Story: a process left its loop by a `break` that the other did not take, and that one spoke of a broken pipe."""
    left = threading.Event()

    def work(local_group):
        if local_group.rank:
            local_group.close()
            left.set()
            return
        assert left.wait(20.0)
        local_group.send(1, b"v")

    here, _ = meet(2, work)
    assert isinstance(here, LocalGroupError)
    assert "lost local rank 1 of this node: it has ended, or left its loop before the others" in str(here)
