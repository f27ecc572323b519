"""Loaders, streams and processes that fetch: the same global batches for any number of ranks, from any step on."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from paceline.data import workers
from paceline.data.feed import as_source, batches
from paceline.data.order import Seat, permutation


class Noisy(Dataset):
    """Every sample draws from all three global generators."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int):
        noise = torch.rand(()), np.random.rand(), random.random()
        return torch.tensor(i), torch.tensor([float(each) for each in noise])


class Counted(IterableDataset):
    """A stream that shuffles by the global generator, as streams do."""

    def __init__(self, size: int, has_length: bool = False):
        self.size = size
        if has_length:
            self.__class__ = CountedKnown

    def __iter__(self):
        assert get_worker_info() is None or get_worker_info().num_workers == 1
        yield from ((i, torch.rand(())) for i in torch.randperm(self.size).tolist())


class CountedKnown(Counted):
    def __len__(self) -> int:
        return self.size


class Failing(Noisy):
    def __getitem__(self, i: int):
        if i == 5:
            raise KeyError("sample 5 is broken")
        return super().__getitem__(i)


def seats(num_nodes: int) -> list[Seat]:
    return [Seat(node, num_nodes) for node in range(num_nodes)]


def run(dataset, batch_size=4, epochs=2, seat=None, **options):
    """Every batch as (epoch, step, ends_epoch, samples of the seat)."""
    seat = seat or Seat()
    return [
        (b.epoch, b.step, b.ends_epoch, [] if (rows := b.share(seat)) is None else rows[0].tolist())
        for b in batches(dataset, batch_size, epochs, 7, seat, **options)
    ]


def whole(dataset, num_nodes, **options):
    """What all nodes together read, batch by batch."""
    of_node = [run(dataset, seat=seat, **options) for seat in seats(num_nodes)]
    return [
        (*together[0][:3], [sample for part in together for sample in part[3]])
        for together in zip(*of_node, strict=True)
    ]


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def wait_for(condition, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


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
    next(batches(loaders(TensorDataset(torch.arange(11)))["weighted"], 4, 1, 7, Seat()))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def double(items):
    return {"twice": torch.tensor([2 * int(i) for i, _ in items])}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loaders_collate_fn_is_kept(num_workers):
    loader = DataLoader(Noisy(5), 4, collate_fn=double, num_workers=num_workers)
    assert [b.share(Seat())["twice"].tolist() for b in batches(loader, 4, 1, 0, Seat())] == [[0, 2, 4, 6], [8]]
    assert as_source(loader).fetch(range(1, 3), 0)["twice"].tolist() == [2, 4]


def test_a_loader_of_another_batch_size_is_refused_with_both():
    for loader in (DataLoader(Noisy(5), 3), DataLoader(Counted(5), 3), DataLoader(Noisy(5), batch_size=None)):
        with pytest.raises(ValueError, match=r"batch_size=(3|None), the job 4.*loader\.dataset"):
            next(batches(loader, 4, 1, 0, Seat()))
    sampler = BatchSampler(SequentialSampler(range(5)), 3, False)
    assert len(list(batches(DataLoader(Noisy(5), batch_sampler=sampler), 3, 1, 0, Seat()))) == 2
    with pytest.raises(ValueError, match=r"batches of 2 to 4 samples, the job's batch_size is 3"):
        next(batches(DataLoader(Noisy(9), batch_sampler=Ragged()), 3, 1, 0, Seat()))


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
    (first, *_) = batches(stream, 4, 1, 7, Seat())
    assert first.num_steps == (steps if has_length else None)


@pytest.mark.parametrize("size", [8, 11])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_is_resumed_at_any_step(size, num_workers):
    every = run(Counted(size), epochs=2)
    for at, (epoch, step, *_) in enumerate(every):
        assert run(Counted(size), epochs=2, start=(epoch, step), workers=num_workers) == every[at:]


def test_a_stream_leaves_the_random_state_alone_and_has_its_own():
    before = torch.get_rng_state()
    (batch,) = batches(Counted(4), 4, 1, 7, Seat())
    first = batch.share(Seat())[1]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    (again,) = batches(Counted(4), 4, 1, 7, Seat())
    assert torch.equal(again.share(Seat())[1], first)


def test_a_streams_batch_can_be_dealt_again_to_other_seats():
    for batch in batches(Counted(11), 4, 1, 7, Seat(0, 2)):
        parts = [batch.share(seat) for seat in seats(2)] + [batch.share(Seat())]
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
        next(batches(Counted(0), 4, 10**9, 7, Seat()))
    with pytest.raises(ValueError, match=r"gave 3 samples in epoch 0; one batch"):
        next(batches(DataLoader(Counted(3), 4, drop_last=True), 4, 10**9, 7, Seat()))
    with pytest.raises(ValueError, match=r"ended after 11 samples, 16 were used"):
        next(batches(Counted(11), 4, 2, 7, Seat(), start=(0, 4)))
    assert run(Counted(11), start=(0, 3)) == run(Counted(11), start=(1, 0))


# Processes that fetch.


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_samples_made_by_processes_do_not_depend_on_who_makes_them(num_nodes):
    def rows(num_workers, num_nodes):
        parts = [list(batches(Noisy(11), 4, 2, 7, seat, workers=num_workers)) for seat in seats(num_nodes)]
        shares = [
            [b.share(s) for b, s in zip(together, seats(num_nodes), strict=True)]
            for together in zip(*parts, strict=True)
        ]
        return [torch.cat([part[1] for part in each]) for each in shares]

    one = rows(1, 1)
    assert all(torch.equal(a, b) for a, b in zip(one, rows(2, num_nodes), strict=True))
    assert len({row.tolist()[0] for part in one for row in part}) == 22  # no two samples of two epochs alike


def test_a_batch_from_processes_can_be_dealt_again_and_asked_twice():
    before = torch.get_rng_state()
    for batch in batches(Noisy(11), 4, 1, 7, Seat(0, 2), workers=1):
        mine, other, both = batch.share(Seat(0, 2)), batch.share(Seat(1, 2)), batch.share(Seat())
        assert torch.equal(torch.cat([mine[1], other[1]]), both[1])
        assert torch.equal(batch.share(Seat(0, 2))[1], mine[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_that_are_skipped_or_come_late_are_the_right_ones():
    made = list(batches(Noisy(40), 4, 1, 7, Seat(), workers=2))
    order = permutation(7, 0, 40)
    for at in (3, 9, 9, 0, 5):
        assert made[at].share(Seat())[0].tolist() == order[4 * at : 4 * at + 4].tolist()


def test_resuming_with_processes_gives_the_same_rows():
    def rows(**options):
        return [batch.share(Seat())[1] for batch in batches(Noisy(11), 4, 2, 7, Seat(), workers=1, **options)]

    every = rows()
    assert all(torch.equal(a, b) for a, b in zip(rows(start=(0, 2)), every[2:], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(rows(start=(1, 1)), every[4:], strict=True))


@pytest.mark.parametrize("room", [True, False])
def test_rows_arrive_whole_with_and_without_shared_memory(monkeypatch, room):
    items = [
        {"a": torch.tensor(i, dtype=torch.bfloat16), "b": (torch.zeros(0), torch.full((2, 3), i > 1)), "c": str(i)}
        for i in range(4)
    ]
    monkeypatch.setattr(workers, "_has_room", lambda: room)
    (batch,) = batches(items, 4, 1, 0, Seat(), shuffle=False, workers=1)
    rows = batch.share(Seat())
    assert rows["a"].tolist() == [0, 1, 2, 3]
    assert rows["a"].dtype == torch.bfloat16
    assert rows["b"][0].shape == (4, 0)
    assert rows["b"][1][:, 0, 0].tolist() == [False, False, True, True]
    assert rows["c"] == ["0", "1", "2", "3"]
    rows["b"][1].zero_()  # writable


@pytest.mark.parametrize("dataset", [Noisy(100), Counted(100)])
@pytest.mark.parametrize("ending", ["close", "exception", "exhausted"])
def test_no_process_is_left_however_the_loop_ends(dataset, ending):
    made = batches(dataset, 4, 1, 7, Seat(), workers=2)
    if ending == "exhausted":
        assert len([batch.share(Seat()) for batch in made]) == 25
    else:
        next(made).share(Seat())
        assert children()
        if ending == "exception":
            with pytest.raises(ZeroDivisionError):
                made.throw(ZeroDivisionError())
        made.close()
    assert wait_for(lambda: not children())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_dataset_raises_arrives(num_workers):
    with pytest.raises(KeyError, match="sample 5 is broken"):
        run(Failing(11), workers=num_workers)
    assert wait_for(lambda: not children())


def test_wait_is_the_time_a_batch_was_waited_for():
    class Slow(Noisy):
        def __getitem__(self, i):
            time.sleep(0.01)
            return super().__getitem__(i)

    for batch in batches(Slow(8), 4, 1, 0, Seat()):
        assert batch.wait_s == 0
        batch.share(Seat())
        assert 0.04 <= batch.wait_s < 1
    made = batches(Slow(40), 4, 1, 0, Seat(), workers=1)
    late = next(made)
    time.sleep(0.5)  # the process goes on meanwhile
    late.share(Seat())
    assert late.wait_s < 0.03
    made.close()


def test_positions_follow_each_other():
    made = list(batches(Noisy(11), 4, 2, 0, Seat()))
    assert [batch.next for batch in made] == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_settings_out_of_range_are_told():
    for wrong in ({"workers": -1}, {"ahead": -1}, {"start": (0, -1)}):
        with pytest.raises(ValueError, match="numbers of 0 or more"):
            next(batches(Noisy(3), 4, 1, 0, Seat(), **wrong))
    with pytest.raises(ValueError, match=r"epoch 0 has 3 batches of 4 samples, and step 4 was asked for"):
        next(batches(Noisy(11), 4, 1, 0, Seat(), start=(0, 4)))


SCRIPT = """
import os, socket, sys, time
import torch
from paceline.data.feed import batches
from paceline.data.order import Seat
mine = socket.socket(fileno=int(sys.argv[1]))
torch.set_num_threads(2)
torch.rand(500, 500) @ torch.rand(500, 500)
class Slow:
    def __len__(self): return 100
    def __getitem__(self, i):
        time.sleep(0.05)
        return torch.tensor(i)
made = batches(Slow(), 4, 1, 0, Seat(0, 2), workers=2)
next(made).share(Seat(0, 2))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_trainer_is_noticed_at_once_though_its_processes_live_a_moment_longer(tmp_path: Path):
    here, there = socket.socketpair()
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(there.fileno())]
    with subprocess.Popen(command, pass_fds=[there.fileno()], env=environment, stdout=subprocess.PIPE) as trainer:
        there.close()
        assert trainer.stdout.readline() == b"ready\n"
        readers = psutil.Process(trainer.pid).children()
        assert len(readers) == 2
        trainer.kill()
        here.settimeout(2)
        assert here.recv(1) == b""  # the end of the socket: nobody else holds it
        here.close()
    assert not psutil.wait_procs(readers, timeout=20)[1]
