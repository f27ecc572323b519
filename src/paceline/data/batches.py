"""Global batches, divided among processes: a batch knows its samples, and fetches those of an assignment.

A batch that must be computed again by other ranks is the same batch: only the assignment changes. It may change
between any two steps; rows that were fetched ahead for another assignment are dropped and fetched again. Sources
that draw their randomness from (seed, epoch, sample) are fetched ahead of time in a thread. Datasets that make
their samples themselves are read when asked, so that their use of global random state keeps its
order, or ahead of time by processes, where every sample has a random state of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import tee
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from paceline.contract import GlobalBatch, Share
from paceline.data import sampler
from paceline.data.dataloader import Order, check_batch_size, options_of, order_of, samples_of
from paceline.data.sampler import Assignment, Indices
from paceline.data.sources import Collated, Source, Stream, Window, as_source
from paceline.data.workers import Rows, Seeded, Windows

__all__ = ["Batch", "Cursor", "Given", "GlobalBatch", "as_source", "batches", "samples"]

Position = tuple[int, int]  # epoch, step


@dataclass
class Cursor:
    """Where a training stands in its data. ``epoch``, ``next_step``: the next batch. ``began``: the epoch in which the
    current call of `Pace.batches` began, for ``epochs``; ``calls`` so far; ``between``: one is over, and no next begun.
    ``resumed``: the next call goes on from here. ``facts``: of the dataset, for comparison. ``again``: samples to
    be dealt once more when the present epoch ends: who had them was lost, with all that it made of them."""

    epoch: int = 0
    next_step: int = 0
    began: int = 0
    calls: int = 0
    epochs: int = 0
    between: bool = False
    resumed: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    again: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Batch(GlobalBatch):
    """One of a dataset's."""

    source: Source
    indices: Indices
    epoch: int
    step: int
    num_steps: int | None
    ends_epoch: bool
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.weight, self.assigned, self.num_local_samples = float(len(self.indices)), True, 0
        self._take: Callable[[Batch, Share], Any] = Batch.fetch

    @property
    def next(self) -> Position:
        """Where to start after this batch."""
        return (self.epoch + 1, 0) if self.ends_epoch else (self.epoch, self.step + 1)

    def share(self, assignment: Share) -> Any:
        start = time.perf_counter()
        rows, self.num_local_samples = self._take(self, assignment), len(self.indices_of(assignment))
        self.wait_s += time.perf_counter() - start
        return rows

    def fetch(self, assignment: Share) -> Any:
        """`share`, now and in this process."""
        mine = self.indices_of(assignment)
        return self.source.fetch(mine, self.epoch) if mine else None

    def indices_of(self, assignment: Share) -> list[int]:
        rows = assignment.rows(len(self.indices))
        mine: list[int] = self.indices[rows.start : rows.stop].tolist()
        return mine

    def expect(self, take: Callable[[Batch, Share], Any]) -> None:
        """``take(batch, assignment)`` gives its rows, which somebody may be fetching already."""
        self._take = take


class Given(GlobalBatch):
    """Rows that the user brought: they are this process's share, and cannot be dealt to another."""

    def __init__(self, rows: Any, weight: float):
        self.rows, self.weight = rows, weight

    def share(self, assignment: Share) -> Any:
        return self.rows


def batches(
    dataset: Any,
    batch_size: int,
    epochs: int,
    seed: int,
    assignment: Assignment | Callable[[], Assignment],
    shuffle: bool = True,
    ahead: int = 2,
    start: Position = (0, 0),
    workers: int = 0,
    times: int = 1,
    again: list[int] | None = None,
) -> Iterator[Batch]:
    """Every global batch of every epoch from ``start`` on, some of them already being fetched for ``assignment``.

    ``again``: what `Cursor.again` says, and may get more meanwhile; not of a stream, which has no samples by number.

    ``assignment``: this process's, or a function that says which it is by now.

    A DataLoader brings its own order and number of processes; ``workers`` are the processes that fetch, 0 for none;
    ``times`` its batch is ``batch_size``, where that is tried on more machines.
    A stream is read whole by every process, in its own order. Raises ValueError for what is no dataset.
    """
    if workers < 0 or ahead < 0 or min(start) < 0:
        raise ValueError(f"batches() got workers={workers}, ahead={ahead}, start={start}; give numbers of 0 or more")
    now: Callable[[], Assignment] = assignment if callable(assignment) else lambda: assignment
    source, options = as_source(dataset), {}
    if isinstance(dataset, DataLoader):
        workers, options = workers or dataset.num_workers, options_of(dataset)
    if isinstance(source, Stream):
        drop_last = isinstance(dataset, DataLoader) and dataset.drop_last
        if isinstance(dataset, DataLoader):
            check_batch_size(dataset, batch_size, times)
        yield from _of_stream(source, batch_size, epochs, seed, start, drop_last, workers, options)
        return
    size = len(source)
    if not size:
        raise ValueError("the dataset is empty; give at least one sample")
    if isinstance(dataset, DataLoader):
        turns = order_of(dataset, size, batch_size, seed, times)
    else:
        turns = Order(size, batch_size, seed, shuffle)
    plain = _of_map(source, turns, epochs, start)
    if workers:
        source = seeded = Seeded(source, seed)
        plain = _by_processes(seeded, turns, epochs, start, now, workers, options)
    elif not isinstance(source, Collated) and ahead:
        plain = _by_thread(plain, now, ahead)
    waiting = [] if again is None else again
    if start[0] and not start[1]:
        yield from _again(source, waiting, batch_size, start[0] - 1, 0)
    for batch in plain:
        yield batch
        if batch.ends_epoch:
            yield from _again(source, waiting, batch_size, batch.epoch, batch.step + 1)


def _again(source: Source, waiting: list[int], batch_size: int, epoch: int, step: int) -> Iterator[Batch]:
    """Further batches after an epoch's last one. What is lost of these waits in its turn."""
    while waiting:
        indices, waiting[:batch_size] = np.array(waiting[:batch_size]), []
        yield Batch(source, indices, epoch, step, None, True)
        step += 1


def samples(dataset: Any, source: Source) -> Indices:
    """Of all that is to be evaluated, the indices: a DataLoader's sampler may leave some out."""
    if isinstance(dataset, DataLoader) and not isinstance(source, Stream):
        return samples_of(dataset, len(source))
    return np.arange(len(source))


def _of_map(source: Source, turns: Order, epochs: int, start: Position) -> Iterator[Batch]:
    for epoch in range(start[0], epochs):
        steps, windows = turns.epoch(epoch)
        first = start[1] if epoch == start[0] else 0
        if not steps:
            raise ValueError(
                f"the dataset has {turns.size} samples and no whole batch of {turns.batch_size}, and drop_last leaves "
                f"out what is no whole one; give a smaller batch_size, or more samples"
            )
        if first > steps:
            raise ValueError(
                f"epoch {epoch} has {steps} batches of {turns.batch_size} samples, and step {first} was requested; "
                f"give the dataset and batch size that the position was saved with"
            )
        for step, indices in enumerate(windows):
            if step >= first:
                yield Batch(source, indices, epoch, step, steps, step == steps - 1)


def _by_thread(plain: Iterator[Batch], now: Callable[[], Assignment], ahead: int) -> Iterator[Batch]:
    queue: list[_Coming] = []
    pool = ThreadPoolExecutor(1, "paceline feed")
    try:
        for batch in plain:
            for coming in queue:
                coming.send(now())
            queue.append(_Coming(pool, batch, now()))
            if len(queue) > ahead:
                yield queue.pop(0).batch
        while queue:
            for coming in queue:
                coming.send(now())
            yield queue.pop(0).batch
        pool.shutdown()
    finally:
        pool.shutdown(cancel_futures=True)


class _Coming:
    """A batch whose rows for one assignment a thread is fetching."""

    def __init__(self, pool: ThreadPoolExecutor, batch: Batch, assignment: Assignment):
        self.pool, self.batch, self.assignment = pool, batch, assignment
        self.rows: Future[Any] = pool.submit(batch.fetch, assignment)
        batch.expect(self.take)

    def send(self, assignment: Assignment) -> None:
        """For this assignment, if it is another."""
        if assignment != self.assignment:
            self.rows.cancel()
            self.assignment, self.rows = assignment, self.pool.submit(self.batch.fetch, assignment)

    def take(self, batch: Batch, assignment: Share) -> Any:
        return self.rows.result() if assignment == self.assignment else batch.fetch(assignment)


def _by_processes(
    source: Seeded,
    turns: Order,
    epochs: int,
    start: Position,
    now: Callable[[], Assignment],
    num_processes: int,
    options: dict[str, Any],
) -> Iterator[Batch]:
    told, dealt = tee(_of_map(source, turns, epochs, start))
    asked: dict[int, Assignment] = {}  # whose rows the processes were asked for

    def requests() -> Iterator[tuple[int, list[int]]]:
        for number, batch in enumerate(told):
            asked[number] = now()
            yield batch.epoch, batch.indices_of(asked[number])

    rows = Rows(source, requests(), num_processes, options)

    def take(number: int, batch: Batch, assignment: Share) -> Any:
        if not rows.has(number):
            return batch.fetch(assignment)
        found = rows.take(number)  # even if it is another's: the processes go on as rows are taken
        for older in [each for each in asked if each < number]:
            del asked[older]
        return found if asked[number] == assignment else batch.fetch(assignment)

    try:
        for number, batch in enumerate(dealt):
            batch.expect(partial(take, number))
            yield batch
    finally:
        rows.close()


def _of_stream(
    stream: Stream,
    batch_size: int,
    epochs: int,
    seed: int,
    start: Position,
    drop_last: bool,
    num_processes: int,
    options: dict[str, Any],
) -> Iterator[Batch]:
    try:
        length: int | None = len(stream)
    except ValueError:
        length = None
    steps = None if length is None else length // batch_size if drop_last else sampler.num_steps(length, batch_size)
    dataset = Windows(stream, seed, batch_size, start, epochs, drop_last)
    # a stream is one sequence, so one process reads it
    windows: Any = Rows(dataset, None, 1, options) if num_processes else iter(dataset)
    try:
        began = time.perf_counter()
        here = next(windows, None)
        while here is not None:
            # reading one window further tells whether this one is the last of its epoch
            following = next(windows, None)
            epoch, step, items = here
            ends = following is None or following[0] != epoch
            wait_s = time.perf_counter() - began
            yield Batch(Window(items, stream.collate), np.arange(len(items)), epoch, step, steps, ends, wait_s)
            began = time.perf_counter()
            here = following
    finally:
        windows.close()
