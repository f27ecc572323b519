"""DataLoaders and streams: the same global batches for any number of ranks, from any step on."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from feeding import Counted, Noisy, run, seats, whole
from paceline.data.batches import as_source, batches
from paceline.data.sampler import Assignment, permutation

# DataLoaders.


def loaders(data):
    weights = torch.arange(1.0, 12)
    return {
        "sequential": DataLoader(data, 4),
        "shuffled": DataLoader(data, 4, shuffle=True),
        "weighted": DataLoader(data, 4, sampler=WeightedRandomSampler(weights, 9)),
        "own generator": DataLoader(
            data, 4, sampler=WeightedRandomSampler(weights, 9, generator=torch.Generator().manual_seed(1))
        ),
        "reversed": DataLoader(data, 4, sampler=Backwards(data)),
        "batches": DataLoader(data, batch_sampler=Ragged()),
        "drop last": DataLoader(data, 4, drop_last=True),
        "distributed": DataLoader(data, 4, sampler=DistributedSampler(data, 2, 1, shuffle=False)),
    }


class Backwards(Sampler):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(range(len(self.data) - 1, -1, -1))


class Ragged(Sampler):
    def __iter__(self):
        order = torch.randperm(9).tolist()
        return iter([order[:2], order[2:6], order[6:]])


NAMES = list(loaders(range(11)))


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_loaders_global_batches_do_not_depend_on_how_many_read_them(name, num_nodes):
    alone = whole(loaders(Noisy(11))[name], 1)
    torch.manual_seed(num_nodes)  # ranks differ in their random state, and it must not matter
    assert whole(loaders(Noisy(11))[name], num_nodes) == alone


@pytest.mark.parametrize("name", NAMES)
def test_a_loader_is_resumed_at_any_step(name):
    every = run(loaders(Noisy(11))[name], epochs=3)
    for at, (epoch, step, *_) in enumerate(every):
        assert run(loaders(Noisy(11))[name], epochs=3, start=(epoch, step)) == every[at:]


def test_a_loaders_order_is_kept_or_replaced_by_ours():
    samples = {name: [rows for *_, rows in run(loader, epochs=1)] for name, loader in loaders(Noisy(11)).items()}
    ours = permutation(7, 0, 11).tolist()
    assert samples["sequential"] == samples["distributed"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert samples["shuffled"] == [ours[:4], ours[4:8], ours[8:]]
    assert samples["reversed"] == [[10, 9, 8, 7], [6, 5, 4, 3], [2, 1, 0]]
    assert samples["drop last"] == samples["sequential"][:2]
    assert [len(rows) for rows in samples["batches"]] == [2, 4, 3]
    assert [len(rows) for rows in samples["weighted"]] == [4, 4, 1]
    epochs = run(loaders(Noisy(11))["weighted"])
    assert [rows for *_, rows in epochs[:3]] != [rows for *_, rows in epochs[3:]]


def test_listing_a_sampler_leaves_the_random_state_alone():
    before = torch.get_rng_state(), random.getstate()
    next(batches(loaders(TensorDataset(torch.arange(11)))["weighted"], 4, 1, 7, Assignment()))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def double(items):
    return {"twice": torch.tensor([2 * int(i) for i, _ in items])}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loaders_collate_fn_is_kept(num_workers):
    loader = DataLoader(Noisy(5), 4, collate_fn=double, num_workers=num_workers)
    assert [b.share(Assignment())["twice"].tolist() for b in batches(loader, 4, 1, 0, Assignment())] == [
        [0, 2, 4, 6],
        [8],
    ]
    assert as_source(loader).fetch(range(1, 3), 0)["twice"].tolist() == [2, 4]


def test_a_loader_of_another_batch_size_is_refused_with_both():
    for loader in (DataLoader(Noisy(5), 3), DataLoader(Counted(5), 3)):
        with pytest.raises(ValueError, match=r"batch_size=3, the job 4.*loader\.dataset"):
            next(batches(loader, 4, 1, 0, Assignment()))
    for whole_batches in (Noisy(5), Counted(5)):
        with pytest.raises(ValueError, match=r"batch_size=None.*whole batches.*batch_size=4, or call pace\.step"):
            next(batches(DataLoader(whole_batches, batch_size=None), 4, 1, 0, Assignment()))
    sampler = BatchSampler(SequentialSampler(range(5)), 3, False)
    assert len(list(batches(DataLoader(Noisy(5), batch_sampler=sampler), 3, 1, 0, Assignment()))) == 2
    with pytest.raises(ValueError, match=r"batches of 2 to 4 samples, the job's batch_size is 3"):
        next(batches(DataLoader(Noisy(9), batch_sampler=Ragged()), 3, 1, 0, Assignment()))


# Streams.


@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("size", [1, 4, 8, 11])
@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_a_streams_global_batches_do_not_depend_on_how_many_read_them(num_nodes, size, has_length):
    stream = Counted(size, has_length)
    torch.manual_seed(num_nodes)
    together = whole(stream, num_nodes)
    assert together == whole(stream, 1)
    steps = -(-size // 4)
    assert [entry[:3] for entry in together] == [(e, s, s == steps - 1) for e in range(2) for s in range(steps)]
    for epoch in range(2):
        assert sorted(i for e, *_, rows in together if e == epoch for i in rows) == list(range(size))
    (first, *_) = batches(stream, 4, 1, 7, Assignment())
    assert first.num_steps == (steps if has_length else None)


@pytest.mark.parametrize("size", [8, 11])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_is_resumed_at_any_step(size, num_workers):
    every = run(Counted(size), epochs=2)
    for at, (epoch, step, *_) in enumerate(every):
        assert run(Counted(size), epochs=2, start=(epoch, step), workers=num_workers) == every[at:]


def test_a_stream_leaves_the_random_state_alone_and_has_its_own():
    before = torch.get_rng_state()
    (batch,) = batches(Counted(4), 4, 1, 7, Assignment())
    first = batch.share(Assignment())[1]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    (again,) = batches(Counted(4), 4, 1, 7, Assignment())
    assert torch.equal(again.share(Assignment())[1], first)


def test_a_streams_batch_can_be_dealt_again_to_other_seats():
    for batch in batches(Counted(11), 4, 1, 7, Assignment(0, 2)):
        parts = [batch.share(assignment) for assignment in seats(2)] + [batch.share(Assignment())]
        assert torch.equal(torch.cat([part[0] for part in parts[:2] if part]), parts[2][0])


def test_a_streams_last_short_batch_is_dropped_where_the_loader_says_so():
    assert [len(rows) for *_, rows in run(DataLoader(Counted(11), 4, drop_last=True))] == [4, 4, 4, 4]
    assert [ends for _, _, ends, _ in run(DataLoader(Counted(11), 4, drop_last=True))] == [False, True, False, True]


def test_a_stream_with_a_length_can_be_evaluated_in_parts():
    source = as_source(range_stream(10))
    assert len(source) == 10
    assert source.fetch(range(4, 7), 0).tolist() == [4, 5, 6]
    assert source.fetch(range(7, 10), 0).tolist() == [7, 8, 9]
    assert source.fetch(range(0, 2), 0).tolist() == [0, 1]
    with pytest.raises(ValueError, match="Counted has no length"):
        len(as_source(Counted(3)))


def range_stream(size):
    class Numbers:
        def __iter__(self):
            return iter(range(size))

        def __len__(self):
            return size

    return Numbers()


def test_streams_that_give_nothing_or_too_little_are_told():
    with pytest.raises(ValueError, match="gave 0 samples in epoch 0"):
        next(batches(Counted(0), 4, 10**9, 7, Assignment()))
    with pytest.raises(ValueError, match=r"gave 3 samples in epoch 0; one batch"):
        next(batches(DataLoader(Counted(3), 4, drop_last=True), 4, 10**9, 7, Assignment()))
    with pytest.raises(ValueError, match=r"ended after 11 samples, 16 were used"):
        next(batches(Counted(11), 4, 2, 7, Assignment(), start=(0, 4)))
    assert run(Counted(11), start=(0, 3)) == run(Counted(11), start=(1, 0))


def test_positions_follow_each_other():
    made = list(batches(Noisy(11), 4, 2, 0, Assignment()))
    assert [batch.next for batch in made] == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_settings_out_of_range_are_told():
    for wrong in ({"workers": -1}, {"ahead": -1}, {"start": (0, -1)}):
        with pytest.raises(ValueError, match="numbers of 0 or more"):
            next(batches(Noisy(3), 4, 1, 0, Assignment(), **wrong))
    with pytest.raises(ValueError, match=r"epoch 0 has 3 batches of 4 samples, and step 4 was requested"):
        next(batches(Noisy(11), 4, 1, 0, Assignment(), start=(0, 4)))
