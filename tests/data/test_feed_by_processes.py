"""Worker processes give the same samples for any number of workers, and all of them end."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from feeding import Counted, Failing, Noisy, run, seats
from paceline.data import workers
from paceline.data.batches import batches
from paceline.data.sampler import Assignment, permutation
from paceline.data.workers import Prefetcher


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def wait_for(condition, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_samples_made_by_processes_do_not_depend_on_who_makes_them(num_nodes):
    def rows(num_workers, num_nodes):
        parts = [list(batches(Noisy(11), 4, 2, 7, assignment, workers=num_workers)) for assignment in seats(num_nodes)]
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
    for batch in batches(Noisy(11), 4, 1, 7, Assignment(0, 2), workers=1):
        first, other, both = batch.share(Assignment(0, 2)), batch.share(Assignment(1, 2)), batch.share(Assignment())
        assert torch.equal(torch.cat([first[1], other[1]]), both[1])
        assert torch.equal(batch.share(Assignment(0, 2))[1], first[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_that_are_skipped_or_come_late_are_the_right_ones():
    made = list(batches(Noisy(40), 4, 1, 7, Assignment(), workers=2))
    order = permutation(7, 0, 40)
    for at in (3, 9, 9, 0, 5):
        assert made[at].share(Assignment())[0].tolist() == order[4 * at : 4 * at + 4].tolist()


def test_resuming_with_processes_gives_the_same_rows():
    def rows(**options):
        return [
            batch.share(Assignment())[1] for batch in batches(Noisy(11), 4, 2, 7, Assignment(), workers=1, **options)
        ]

    every = rows()
    assert all(torch.equal(a, b) for a, b in zip(rows(start=(0, 2)), every[2:], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(rows(start=(1, 1)), every[4:], strict=True))


@pytest.mark.parametrize("room", [True, False])
def test_rows_arrive_whole_with_and_without_shared_memory(monkeypatch, room):
    items = [
        {"a": torch.tensor(i, dtype=torch.bfloat16), "b": (torch.zeros(0), torch.full((2, 3), i > 1)), "c": str(i)}
        for i in range(4)
    ]
    monkeypatch.setattr(workers, "_shm_is_large", lambda: room)
    (batch,) = batches(items, 4, 1, 0, Assignment(), shuffle=False, workers=1)
    rows = batch.share(Assignment())
    assert rows["a"].tolist() == [0, 1, 2, 3]
    assert rows["a"].dtype == torch.bfloat16
    assert rows["b"][0].shape == (4, 0)
    assert rows["b"][1][:, 0, 0].tolist() == [False, False, True, True]
    assert rows["c"] == ["0", "1", "2", "3"]
    rows["b"][1].zero_()  # writable


@pytest.mark.parametrize("dataset", [Noisy(100), Counted(100)])
@pytest.mark.parametrize("ending", ["close", "exception", "exhausted"])
def test_no_process_is_left_however_the_loop_ends(dataset, ending):
    made = batches(dataset, 4, 1, 7, Assignment(), workers=2)
    if ending == "exhausted":
        assert len([batch.share(Assignment()) for batch in made]) == 25
    else:
        next(made).share(Assignment())
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

    for batch in batches(Slow(8), 4, 1, 0, Assignment()):
        assert batch.wait_s == 0
        batch.share(Assignment())
        assert 0.04 <= batch.wait_s < 1
    made = batches(Slow(40), 4, 1, 0, Assignment(), workers=1)
    waits = []
    for batch in itertools.islice(made, 5):
        time.sleep(0.15)  # the process goes on meanwhile
        batch.share(Assignment())
        waits.append(batch.wait_s)
    made.close()
    assert min(waits) < 0.03, "other work on the machine only adds"


SCRIPT = """
import os, socket, sys, time
import torch
from paceline.data.batches import batches
from paceline.data.sampler import Assignment
mine = socket.socket(fileno=int(sys.argv[1]))
torch.set_num_threads(2)
torch.rand(500, 500) @ torch.rand(500, 500)
class Slow:
    def __len__(self): return 100
    def __getitem__(self, i):
        time.sleep(0.05)
        return torch.tensor(i)
made = batches(Slow(), 4, 1, 0, Assignment(0, 2), workers=2)
next(made).share(Assignment(0, 2))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.dear
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


class Collecting(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        return torch.tensor(index)


@pytest.mark.timeout(60)
def test_what_only_this_process_can_end_is_no_garbage_of_one_that_reads():
    """Story: a reading process collected an abandoned link, whose threads it does not have, and hung or died."""

    class Cycle:
        pass

    gc.collect()
    gc.disable()
    try:
        cycle = Cycle()
        cycle.itself, cycle.group = cycle, dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
        del cycle
        reading = Prefetcher(Collecting(), range(4), 1, {})
        assert [int(reading.take(i)) for i in range(4)] == [0, 1, 2, 3]
        reading.close()
    finally:
        gc.enable()
        gc.collect()


class Unhurried:
    """Requests: those of the first thread are made while the second begins, whose processes start after the first's."""

    def __init__(self, waits_for, begun, seconds):
        self.waits_for, self.begun, self.seconds = waits_for, begun, seconds

    def __iter__(self):
        self.begun.set()
        if self.seconds is None:
            self.waits_for.wait(5)
        return self

    def __next__(self):
        if self.seconds is not None:
            self.waits_for.wait(self.seconds)
        return 0


@pytest.mark.timeout(60)
def test_nor_where_two_threads_start_processes_at_once(tmp_path):
    """Story: one thread turned collection on again before the processes of the other had started."""
    here, frozen, thresholds = os.getpid(), gc.get_freeze_count(), gc.get_threshold()

    froze: list[int] = []  # in the process: to count what is frozen takes long, where that is much

    def collected(phase, info):
        if os.getpid() == here or froze:
            return
        if gc.get_freeze_count() > frozen:
            froze.append(os.getpid())
        else:
            (tmp_path / "early").touch()

    one_is_there, two_begins, never = threading.Event(), threading.Event(), threading.Event()

    def one():
        feeds.append(Prefetcher(Collecting(), Unhurried(two_begins, never, 0.5), 1, {}))
        one_is_there.set()

    def two():
        feeds.append(Prefetcher(Collecting(), Unhurried(one_is_there, two_begins, None), 1, {}))

    feeds: list[Prefetcher] = []
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        threads = [threading.Thread(target=each) for each in (one, two)]
        threads[0].start()
        time.sleep(0.1)
        threads[1].start()
        for thread in threads:
            thread.join(30)
        assert [int(next(feed)) for feed in feeds] == [0, 0]
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*thresholds)
        for feed in feeds:
            feed.close()
    assert gc.isenabled()
    assert not (tmp_path / "early").exists()
