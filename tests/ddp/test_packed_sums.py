"""Whole buckets that two ranks pack: the bits of torch's sum, and one decision of both ranks."""

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline.ddp.sums import lane, packed_sums
from paceline.ddp.sums.packed_sums import PackedSums, Trial

PLAIN_PASSES, PACKED_PASSES = (2, 3, 4), (6, 7, 8)


def on_two_ranks(monkeypatch, work):
    """What ``work(rank, sums)`` gives on each; ranks are threads."""
    store = dist.HashStore()
    known = {"get_rank": lambda group: group, "get_world_size": lambda group: 2}
    real = {name: getattr(dist, name) for name in ("PrefixStore", "ProcessGroupGloo")}
    monkeypatch.setattr(lane, "dist", SimpleNamespace(**known, **real))
    monkeypatch.setattr(packed_sums, "PART_BYTES", 1 << 15)

    def run(rank):
        return work(rank, PackedSums(lane.Lane(rank, store, "sums", timedelta(seconds=20), [0, 1], False)))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_packed_sum_has_the_bits_of_the_plain_one(monkeypatch, dtype):
    def own(rank):
        values = torch.randn(50_001, generator=torch.Generator().manual_seed(rank)).to(dtype)
        values[::7] = 0.0
        values[:4] = torch.tensor([-0.0, float("inf"), torch.finfo(dtype).smallest_normal / 4, 3e38])
        return values

    def work(rank, sums):
        whole = [own(rank), own(rank + 2)]
        return [each.wait().clone() for each in map(sums.run, whole)]

    for sums in on_two_ranks(monkeypatch, work):
        for given, both in zip((0, 2), sums, strict=True):
            assert torch.equal(both, own(given) / 2 + own(given + 1) / 2)


def passes(sums, plain_s, packed_s, count=12):
    """Whether each of so many passes packs, where those of each form take so long."""
    told = []
    for number in range(count):
        sums.begin_pass()
        told.append(sums.packs)
        sums._begun_s, sums._end_s = 0.0, (packed_s if sums.packs else plain_s) + number / 1e6
    return told


@pytest.mark.parametrize(
    ("one", "other", "packs"),
    [
        ((1.0, 0.5), (1.0, 0.5), True),
        ((1.0, 1.5), (1.0, 1.5), False),
        ((1.0, 0.99), (1.0, 0.99), False),  # not clearly
        ((1.0, 0.5), (0.2, 0.7), True),  # of the slower rank of each form 1.0 and 0.7
        ((1.0, 0.5), (0.2, 1.1), False),
    ],
)
def test_both_ranks_pack_where_the_slower_one_gains(monkeypatch, one, other, packs):
    said = []
    monkeypatch.setattr(packed_sums, "log", SimpleNamespace(info=said.append))
    told = on_two_ranks(monkeypatch, lambda rank, sums: passes(sums, *(one, other)[rank]))
    assert told == [[False] * 5 + [True] * 5 + [packs] * 2] * 2
    slower = f"{max(one[1], other[1]) * 1e3:.0f} ms instead of {max(one[0], other[0]) * 1e3:.0f}"
    assert [slower in text for text in said] == [True] * packs


def test_the_first_pass_of_a_form_and_the_first_of_all_are_not_timed():
    trial, times = Trial(), [0.0, 9, 9, 3, 2, 4, 9, 6, 5, 7]  # of the pass before each
    for took in times:
        trial.begin(took)
    assert trial.complete
    assert trial.least_us == [2e6, 5e6]
    assert Trial().least_us == [math.inf, math.inf]


@pytest.mark.parametrize("rank_that_ends", [0, 1])
def test_a_sum_whose_other_rank_has_gone_raises(monkeypatch, rank_that_ends):
    def work(rank, sums):
        sums.run(torch.ones(20_000)).wait()  # connected
        if rank == rank_that_ends:
            sums.lane._gloo = sums._sizes._gloo = None  # its connections are closed
            return None
        with pytest.raises(RuntimeError):
            sums.run(torch.ones(20_000)).wait()
        return sums

    on_two_ranks(monkeypatch, work)
