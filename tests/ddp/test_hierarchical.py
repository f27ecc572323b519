"""Sums in memory that the ranks of a machine share: in closed form, the same bits on all, and no wait for one gone."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.ddp.sums import hierarchical
from paceline.engine.node import local_group
from paceline.engine.node.local_group import LocalGroupError

CHUNK = 64  # bytes


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(hierarchical, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(hierarchical, "GATHERED_BYTES", CHUNK)


def on_ranks(size, work, timeout_s=20, machines=()):
    """What ``work(rank, sum)`` gives on each; ranks are threads, which the memory does not know."""
    store = dist.HashStore()

    def run(rank):
        return work(rank, hierarchical.made(store, rank, machines or [0] * size, timedelta(seconds=timeout_s)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("machines", [[0], [0, 0], [0] * 5, [0, 0, 1, 1], [0, 1, 0], [0, 1, 1, 2, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_those_in_closed_form_whatever_their_length_and_however_late_a_rank_is(machines, dtype):
    size = len(machines)
    most = 5 * CHUNK // dtype.itemsize
    lengths = [0, 1, 2, size, most // 5 - 1, most // 5, most // 5 + 1, most, most + 1] * 3

    def work(rank, together):
        dice, sums = random.Random(rank), []
        for number, length in enumerate(lengths):
            own = (torch.arange(length) % 7 + rank * (number % 3)).to(dtype)
            time.sleep(dice.choice([0, 0, 0.001]))
            together.add(own)
            sums.append(own)
        return sums

    everyone = on_ranks(size, work, machines=machines)
    for number, length in enumerate(lengths):
        expected = torch.arange(length) % 7 * size + number % 3 * sum(range(size))
        for sums in everyone:
            assert torch.equal(sums[number], expected.to(dtype))


@pytest.mark.parametrize("machines", [[0], [0, 0, 0], [0, 0, 1, 1], [0, 1, 2], [0, 0, 1, 1, 2, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_gather_has_every_ranks_values_in_order_also_between_sums(machines, dtype):
    most = 3 * CHUNK // dtype.itemsize

    def work(rank, together):
        dice, found = random.Random(rank), []
        for number, length in enumerate([1, most - 1, most, most + 1, 7] * 4):
            own = (torch.arange(length).view(-1, 1) % 7 + rank * 10 + number).to(dtype)
            time.sleep(dice.choice([0, 0, 0.001]))
            found.append(together.gather(own))
            total = own.float()
            together.add(total)
            assert torch.equal(total, sum(each.float() for each in found[-1]))
        assert together.gathers
        return found

    everyone = on_ranks(len(machines), work, machines=machines)
    for number, gathers in enumerate(zip(*everyone, strict=True)):
        for gathered in gathers:
            for rank, each in enumerate(gathered):
                expected = torch.arange(len(each)).view(-1, 1) % 7 + rank * 10 + number
                assert torch.equal(each, expected.to(dtype))


@pytest.mark.parametrize("machines", [[0, 1, 0], [0, 0, 1], [0, 1, 0, 1]])
def test_a_machines_ranks_that_lie_apart_or_are_more_than_anothers_do_not_gather(machines):
    assert on_ranks(len(machines), lambda rank, together: together.gathers, machines=machines) == [False] * len(
        machines
    )


@pytest.mark.parametrize("machines", [[0, 0], [0, 0, 0], [0, 0, 1, 1], [0, 1, 0]])
def test_the_bits_are_the_same_on_all_ranks_and_of_two_on_each_machine_those_of_plain_sums(machines):
    given = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(len(machines))]
    sums = on_ranks(len(given), lambda rank, together: [own := given[rank].clone(), together.add(own)][0], 20, machines)
    assert all(torch.equal(sums[0], each) for each in sums)
    if len(given) != 3:
        pairs = [one + other for one, other in zip(given[::2], given[1::2], strict=True)]
        assert torch.equal(sums[0], sum(pairs[1:], start=pairs[0]))


def test_shapes_stay():
    sums = on_ranks(2, lambda rank, together: [own := torch.ones(3, 50), together.add(own)][0])
    assert all(torch.equal(each, torch.full((3, 50), 2.0)) for each in sums)


def test_where_one_rank_cannot_share_none_does(monkeypatch):
    real, first = os.memfd_create, threading.Lock()

    def refused(*given):
        if first.acquire(blocking=False):
            raise OSError("no memory files here")
        return real(*given)

    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setenv("PACELINE_RENDEZVOUS_TIMEOUT_S", "2")
    assert on_ranks(2, lambda rank, together: together) == [None, None]


def test_a_stopped_rank_is_waited_for_as_long_as_torch_waits(monkeypatch):
    monkeypatch.setattr(local_group, "state", lambda pid: "T")

    def work(rank, together):
        detector, found = together._group.failure_detector, []
        for stopped_s in (0, 600, 1000):
            detector._stopped[1 - rank] = time.monotonic() - stopped_s
            found.append(detector.failure(1 - rank, "adding up", 0.0))
        return found

    early, later, last = on_ranks(2, work, timeout_s=900)[0]
    assert not early
    assert not later
    assert "has been stopped (state T)" in last


def test_a_rank_that_leaves_ends_the_others_wait():
    def work(rank, together):
        if rank:
            together._group.close()
            return ""
        begin = time.monotonic()
        with pytest.raises(LocalGroupError) as raised:
            together.add(torch.ones(100))
        assert time.monotonic() - begin < 5
        return str(raised.value)

    assert "local rank 0 lost local rank 1 of this node while adding up gradients" in on_ranks(2, work)[0]
