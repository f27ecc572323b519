"""Global batches, dealt to whoever asks: a batch knows its samples, and fetches those of a seat.

A batch that must be computed again by other ranks is the same batch: only the seat changes. Sources
that draw their randomness from (seed, epoch, sample) are fetched ahead of time in a thread. Datasets that make
their samples themselves are read when asked, so that their use of global random state keeps its
order, or ahead of time by processes, where every sample has a random state of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import tee
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from paceline.data import order
from paceline.data.loader import Order, check_batch_size, options_of, order_of
from paceline.data.order import Indices, Seat
from paceline.data.source import Collated, Source, Stream, Window, as_source
from paceline.data.workers import Rows, Seeded, Windows

__all__ = ["Batch", "Given", "as_source", "batches"]

Position = tuple[int, int]  # epoch, step


class Batch:
    """One global batch. ``weight``: its number of rows, known before anybody computes.

    ``num_steps``: of its epoch, or None where only reading on would tell. ``wait_s``: seconds for which its rows were
    waited for, so far.
    """

    def __init__(
        self,
        source: Source,
        indices: Indices,
        epoch: int,
        step: int,
        num_steps: int | None,
        ends_epoch: bool,
        wait_s: float = 0.0,
    ):
        self.source, self.indices, self.epoch, self.step = source, indices, epoch, step
        self.num_steps, self.ends_epoch, self.wait_s = num_steps, ends_epoch, wait_s
        self.weight = float(len(indices))
        self._ahead: tuple[Seat, Callable[[Batch], Any]] | None = None

    @property
    def next(self) -> Position:
        """Where to start after this batch."""
        return (self.epoch + 1, 0) if self.ends_epoch else (self.epoch, self.step + 1)

    def share(self, seat: Seat) -> Any:
        """The seat's rows, or None if it has none."""
        start = time.perf_counter()
        is_coming = self._ahead is not None and self._ahead[0] == seat
        rows = self._ahead[1](self) if self._ahead and is_coming else self.fetch(seat)
        self.wait_s += time.perf_counter() - start
        return rows

    def fetch(self, seat: Seat) -> Any:
        """`share`, now and in this process."""
        mine = self.indices_of(seat)
        return self.source.fetch(mine, self.epoch) if mine else None

    def indices_of(self, seat: Seat) -> list[int]:
        rows = seat.rows(len(self.indices))
        mine: list[int] = self.indices[rows.start : rows.stop].tolist()
        return mine

    def expect(self, seat: Seat, take: Callable[[Batch], Any]) -> None:
        """``take(batch)`` gives this seat's rows, which somebody is fetching already."""
        self._ahead = seat, take


class Given:
    """Rows that the user brought: they are this process's share, and cannot be dealt to another."""

    wait_s = 0.0

    def __init__(self, rows: Any, weight: float):
        self.rows, self.weight = rows, weight

    def share(self, seat: Seat) -> Any:
        return self.rows


def batches(
    dataset: Any,
    batch_size: int,
    epochs: int,
    seed: int,
    seat: Seat,
    shuffle: bool = True,
    ahead: int = 2,
    start: Position = (0, 0),
    workers: int = 0,
) -> Iterator[Batch]:
    """Every global batch of every epoch from ``start`` on, some of them already being fetched for ``seat``.

    A DataLoader brings its own order and number of processes; ``workers`` are the processes that fetch, 0 for none.
    A stream is read whole by every process, in its own order. Raises ValueError for what is no dataset.
    """
    if workers < 0 or ahead < 0 or min(start) < 0:
        raise ValueError(f"batches() got workers={workers}, ahead={ahead}, start={start}; give numbers of 0 or more")
    source, options = as_source(dataset), {}
    if isinstance(dataset, DataLoader):
        workers, options = workers or dataset.num_workers, options_of(dataset)
    if isinstance(source, Stream):
        drop_last = isinstance(dataset, DataLoader) and dataset.drop_last
        if isinstance(dataset, DataLoader):
            check_batch_size(dataset, batch_size)
        yield from _of_stream(source, batch_size, epochs, seed, start, drop_last, workers, options)
        return
    size = len(source)
    if not size:
        raise ValueError("the dataset is empty; give at least one sample")
    if isinstance(dataset, DataLoader):
        turns = order_of(dataset, size, batch_size, seed)
    else:
        turns = Order(size, batch_size, seed, shuffle)
    if workers:
        yield from _by_processes(Seeded(source, seed), turns, epochs, start, seat, workers, options)
    elif isinstance(source, Collated) or not ahead:
        yield from _of_map(source, turns, epochs, start)
    else:
        yield from _by_thread(_of_map(source, turns, epochs, start), seat, ahead)


def _of_map(source: Source, turns: Order, epochs: int, start: Position) -> Iterator[Batch]:
    for epoch in range(start[0], epochs):
        steps, windows = turns.epoch(epoch)
        first = start[1] if epoch == start[0] else 0
        if first > steps or not steps:
            raise ValueError(
                f"epoch {epoch} has {steps} batches of {turns.batch_size} samples, and step {first} was asked for; "
                f"give the dataset and batch size that the position was saved with, and at least one batch"
            )
        for step, indices in enumerate(windows):
            if step >= first:
                yield Batch(source, indices, epoch, step, steps, step == steps - 1)


def _by_thread(plain: Iterator[Batch], seat: Seat, ahead: int) -> Iterator[Batch]:
    queue: list[Batch] = []
    pool = ThreadPoolExecutor(1, "paceline feed")
    try:
        for batch in plain:
            batch.expect(seat, partial(_result, pool.submit(batch.fetch, seat)))
            queue.append(batch)
            if len(queue) > ahead:
                yield queue.pop(0)
        yield from queue
        pool.shutdown()
    finally:
        pool.shutdown(cancel_futures=True)


def _result(future: Future[Any], batch: Batch) -> Any:
    return future.result()


def _by_processes(
    source: Seeded,
    turns: Order,
    epochs: int,
    start: Position,
    seat: Seat,
    num_processes: int,
    options: dict[str, Any],
) -> Iterator[Batch]:
    told, dealt = tee(_of_map(source, turns, epochs, start))
    rows = Rows(source, ((batch.epoch, batch.indices_of(seat)) for batch in told), num_processes, options)

    def take(number: int, batch: Batch) -> Any:
        return rows.take(number) if rows.has(number) else batch.fetch(seat)

    try:
        for number, batch in enumerate(dealt):
            batch.expect(seat, partial(take, number))
            yield batch
    except BaseException:
        rows.close()
        raise


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
    steps = None if length is None else length // batch_size if drop_last else order.num_steps(length, batch_size)
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
