"""Global batches, divided among processes: a batch knows its samples, and fetches those of an assignment.

A batch that other ranks compute again is the same batch; only the assignment changes. The assignment may change between
any two steps; samples that were prefetched for another assignment are dropped and fetched again. A thread prefetches
from sources whose randomness follows from (seed, epoch, sample). Other datasets are read when a batch is needed, so
that their draws from global random state keep their order, or prefetched by workers, with a random state per sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
from paceline.data.workers import Prefetcher, Seeded, Windows

__all__ = ["Batch", "Cursor", "GlobalBatch", "UserBatch", "as_source", "batches", "samples"]

Position = tuple[int, int]  # epoch, step


@dataclass
class Cursor:
    """The position of a training in its data. ``epoch``, ``next_step``: the next batch. ``began``: the epoch in which
    the current call of `Pace.batches` began, for ``epochs``; ``calls`` so far; ``between``: true between two calls.
    ``resumed``: the next call resumes here. ``facts``: metadata of the dataset, for comparison. ``again``: samples to
    repeat at the end of the epoch, because a node failed before their updates were averaged."""

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
    """A global batch of a dataset."""

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
        self.unpack: Callable[[Batch], Any] | None = None  # of the batch to this process's samples, as `Pace.rows`

    def __iter__(self) -> Iterator[Any]:
        """This process's samples: ``x, y = batch``."""
        samples = self.unpack(self) if self.unpack else None
        if samples is None:
            raise ValueError(
                f"this process has no samples of the batch ({len(self.indices)} in all), so it cannot be unpacked; use "
                f"rows = pace.rows(batch), which is None then, and call pace.update() all the same"
            )
        return iter(samples)

    @property
    def next(self) -> Position:
        """The position after this batch."""
        return (self.epoch + 1, 0) if self.ends_epoch else (self.epoch, self.step + 1)

    def share(self, assignment: Share) -> Any:
        start = time.perf_counter()
        rows, self.num_local_samples = self._take(self, assignment), len(self.indices_of(assignment))
        self.wait_s += time.perf_counter() - start
        return rows

    def fetch(self, assignment: Share) -> Any:
        """As `share`, but always read at once and in this process."""
        indices = self.indices_of(assignment)
        return self.source.fetch(indices, self.epoch) if indices else None

    def indices_of(self, assignment: Share) -> list[int]:
        rows = assignment.rows(len(self.indices))
        indices: list[int] = self.indices[rows.start : rows.stop].tolist()
        return indices

    def use_prefetch(self, take: Callable[[Batch, Share], Any]) -> None:
        """``take(batch, assignment)`` returns the samples of an assignment, which may be prefetched."""
        self._take = take


class UserBatch(GlobalBatch):
    """Samples that the user's script has read: they are this process's share, and cannot be reassigned."""

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
    """Every global batch of every epoch from ``start`` on; the next ones are prefetched for ``assignment``.

    ``again``: `Cursor.again`, to which samples may be added meanwhile; not for a stream, which has no sample numbers.

    ``assignment``: this process's assignment, or a function that returns the current one.

    A DataLoader determines order and number of worker processes; ``workers``: processes that prefetch, 0 for none.
    ``times``: ``batch_size`` over the DataLoader's batch size, in a trial with more machines.
    Every process reads a whole stream, in the stream's order. Raises ValueError for an object that is no dataset.
    """
    if workers < 0 or ahead < 0 or min(start) < 0:
        raise ValueError(f"batches() got workers={workers}, ahead={ahead}, start={start}; give numbers of 0 or more")
    current: Callable[[], Assignment] = assignment if callable(assignment) else lambda: assignment
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
        order = order_of(dataset, size, batch_size, seed, times)
    else:
        order = Order(size, batch_size, seed, shuffle)
    unfetched = _of_map(source, order, epochs, start)
    if workers:
        source = seeded = Seeded(source, seed)
        unfetched = _by_processes(seeded, order, epochs, start, current, workers, options)
    elif not isinstance(source, Collated) and ahead:
        unfetched = _by_thread(unfetched, current, ahead)
    remaining = [] if again is None else again
    if start[0] and not start[1]:
        yield from _extra_batches(source, remaining, batch_size, start[0] - 1, 0)
    for batch in unfetched:
        yield batch
        if batch.ends_epoch:
            yield from _extra_batches(source, remaining, batch_size, batch.epoch, batch.step + 1)


def _extra_batches(source: Source, remaining: list[int], batch_size: int, epoch: int, step: int) -> Iterator[Batch]:
    """Further batches after an epoch's last one, of samples to repeat. ``remaining`` may grow while they are used."""
    while remaining:
        indices, remaining[:batch_size] = np.array(remaining[:batch_size]), []
        yield Batch(source, indices, epoch, step, None, True)
        step += 1


def samples(dataset: Any, source: Source) -> Indices:
    """The indices of the samples to evaluate: a DataLoader's sampler may leave some out."""
    if isinstance(dataset, DataLoader) and not isinstance(source, Stream):
        return samples_of(dataset, len(source))
    return np.arange(len(source))


def in_parts(dataset: Any, source: Source, parts: Sequence[list[int]]) -> Generator[Any]:
    """The samples of each part, in order; the processes of a DataLoader read them ahead, if it has any."""
    if not (isinstance(dataset, DataLoader) and dataset.num_workers and len(parts) > 1):
        yield from (source.fetch(part, 0) for part in parts)
        return
    requests = [(0, part) for part in parts]
    rows = Prefetcher(Seeded(source, 0), requests, dataset.num_workers, options_of(dataset))
    try:
        for number in range(len(parts)):
            yield rows.take(number)
    finally:
        rows.close()


def _of_map(source: Source, order: Order, epochs: int, start: Position) -> Iterator[Batch]:
    for epoch in range(start[0], epochs):
        steps, windows = order.epoch(epoch)
        first = start[1] if epoch == start[0] else 0
        if not steps:
            raise ValueError(
                f"the dataset has {order.size} samples, less than one batch of {order.batch_size}, and drop_last drops "
                f"incomplete batches; give a smaller batch_size, or more samples"
            )
        if first > steps:
            raise ValueError(
                f"epoch {epoch} has {steps} batches of {order.batch_size} samples, and step {first} was requested; "
                f"give the dataset and batch size that the position was saved with"
            )
        for step, indices in enumerate(windows):
            if step >= first:
                yield Batch(source, indices, epoch, step, steps, step == steps - 1)


def _by_thread(unfetched: Iterator[Batch], current: Callable[[], Assignment], ahead: int) -> Iterator[Batch]:
    queue: list[_Prefetch] = []
    pool = ThreadPoolExecutor(1, "paceline feed")
    try:
        for batch in unfetched:
            for prefetch in queue:
                prefetch.send(current())
            queue.append(_Prefetch(pool, batch, current()))
            if len(queue) > ahead:
                yield queue.pop(0).batch
        while queue:
            for prefetch in queue:
                prefetch.send(current())
            yield queue.pop(0).batch
        pool.shutdown()
    finally:
        pool.shutdown(cancel_futures=True)


class _Prefetch:
    """A batch whose samples for one assignment a thread is fetching."""

    def __init__(self, pool: ThreadPoolExecutor, batch: Batch, assignment: Assignment):
        self.pool, self.batch, self.assignment = pool, batch, assignment
        self.rows: Future[Any] = pool.submit(batch.fetch, assignment)
        batch.use_prefetch(self.take)

    def send(self, assignment: Assignment) -> None:
        """Fetches for this assignment instead, if it differs."""
        if assignment != self.assignment:
            self.rows.cancel()
            self.assignment, self.rows = assignment, self.pool.submit(self.batch.fetch, assignment)

    def take(self, batch: Batch, assignment: Share) -> Any:
        return self.rows.result() if assignment == self.assignment else batch.fetch(assignment)


def _by_processes(
    source: Seeded,
    order: Order,
    epochs: int,
    start: Position,
    current: Callable[[], Assignment],
    num_processes: int,
    options: dict[str, Any],
) -> Iterator[Batch]:
    to_request, to_yield = tee(_of_map(source, order, epochs, start))
    requested: dict[int, Assignment] = {}  # the assignment of each request to the worker processes

    def requests() -> Iterator[tuple[int, list[int]]]:
        for number, batch in enumerate(to_request):
            requested[number] = current()
            yield batch.epoch, batch.indices_of(requested[number])

    rows = Prefetcher(source, requests(), num_processes, options)

    def take(number: int, batch: Batch, assignment: Share) -> Any:
        if not rows.has(number):
            return batch.fetch(assignment)
        found = rows.take(number)  # even of another assignment: workers fetch more only as samples are taken
        for older in [each for each in requested if each < number]:
            del requested[older]
        return found if requested[number] == assignment else batch.fetch(assignment)

    try:
        for number, batch in enumerate(to_yield):
            batch.use_prefetch(partial(take, number))
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
    windows: Any = Prefetcher(dataset, None, 1, options) if num_processes else iter(dataset)
    try:
        began = time.perf_counter()
        window = next(windows, None)
        while window is not None:
            # one window is read ahead, to know whether the current one is the last of its epoch
            next_window = next(windows, None)
            epoch, step, items = window
            is_last = next_window is None or next_window[0] != epoch
            wait_s = time.perf_counter() - began
            yield Batch(Window(items, stream.collate), np.arange(len(items)), epoch, step, steps, is_last, wait_s)
            began = time.perf_counter()
            window = next_window
    finally:
        windows.close()
