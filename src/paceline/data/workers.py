"""Worker processes that prefetch samples in the order in which they will be needed.

Before a dataset makes a sample, the global generators are seeded from (seed, epoch, index), so that the sample's
augmentation does not depend on the process that makes it.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data import collection  # noqa: F401 - forked processes begin without garbage
from paceline.data.rng import OwnRng, seed_all
from paceline.data.sources import Collated, Source, Stream, collate_items

SHM_BYTES = 1 << 30  # with less shared memory than this (containers have 64 MB), samples are sent through pipes


class Prefetcher:
    """torch's DataLoader as a queue: the item of ``dataset`` for each request; without requests, all its items."""

    def __init__(
        self, dataset: Dataset[Any], requests: Iterable[Any] | None, num_processes: int, options: dict[str, Any]
    ):
        settings = {"multiprocessing_context": "fork", **options}
        settings["worker_init_fn"] = _WorkerInit(settings.get("worker_init_fn"))
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=requests,
            num_workers=num_processes,
            generator=torch.Generator(),  # not the global one, which training uses
            collate_fn=_identity if _shm_is_large() else _as_bytes,
            **settings,
        )
        self._iterator: Iterator[Any] | None = iter(loader)
        self._last: tuple[int, Any] = -1, None

    def __next__(self) -> Any:
        if self._iterator is None:
            raise StopIteration
        try:
            return _mapped(next(self._iterator), _Bytes, _Bytes.tensor)
        except BaseException:
            self.close()
            raise

    def has(self, number: int) -> bool:
        """Whether the samples of this request are fetched or will be."""
        return self._iterator is not None and number >= self._last[0]

    def take(self, number: int) -> Any:
        """The samples of a request; those of earlier requests are dropped."""
        while self._last[0] < number:
            self._last = self._last[0] + 1, next(self)
        return self._last[1]

    def close(self) -> None:
        """Ends the processes."""
        # explicitly, because a traceback may keep the iterator alive
        if shut_down := getattr(self._iterator, "_shutdown_workers", None):
            shut_down()
        self._iterator = None


class Seeded(Dataset[Any]):
    """A source whose samples do not depend on the process that makes them. Its items are (epoch, indices)."""

    def __init__(self, source: Source, seed: int):
        self.source, self.seed = source, seed

    def fetch(self, indices: Sequence[int], epoch: int) -> Any:
        with OwnRng(0):
            return self[epoch, indices]

    def __getitem__(self, request: tuple[int, Sequence[int]]) -> Any:
        (epoch, indices), source = request, self.source
        if not indices:
            return None
        if not isinstance(source, Collated) or source.reads_many:
            seed_all(self.seed, epoch, indices[0])
            return source.fetch(indices, epoch)
        items = []
        for index in indices:
            seed_all(self.seed, epoch, index)
            items.append(source.dataset[index])
        return collate_items(items, source.collate)

    def __len__(self) -> int:
        return len(self.source)


class Windows(IterableDataset[Any]):
    """(epoch, step, samples) of every global batch of a stream. Resuming reads and drops the samples used before."""

    def __init__(
        self, stream: Stream, seed: int, batch_size: int, start: tuple[int, int], epochs: int, drop_last: bool
    ):
        self.stream, self.seed, self.batch_size = stream, seed, batch_size
        self.start, self.epochs, self.drop_last = start, epochs, drop_last

    def __iter__(self) -> Iterator[tuple[int, int, list[Any]]]:
        for epoch in range(self.start[0], self.epochs):
            step = self.start[1] if epoch == self.start[0] else 0
            generator = OwnRng(self.seed, epoch)
            with generator:
                items = self.stream.items(epoch)
                num_used = step * self.batch_size
                num_read = sum(1 for _ in zip(range(num_used), items, strict=False))
            if num_read <= num_used - self.batch_size:
                raise ValueError(
                    f"the stream ended after {num_read} samples, {num_used} were used before; resume with the dataset "
                    f"and batch size that the position was saved with"
                )
            window: list[Any] = [None] * self.batch_size
            while len(window) == self.batch_size:
                with generator:
                    window = [item for _, item in zip(range(self.batch_size), items, strict=False)]
                num_read += len(window)
                if len(window) == self.batch_size or (window and not self.drop_last):
                    yield epoch, step, window
                step += 1
            if num_read < (self.batch_size if self.drop_last else 1):
                raise ValueError(f"the stream gave {num_read} samples in epoch {epoch}; one batch is the minimum")


class _WorkerInit:
    """Initialises a worker process."""

    def __init__(self, user_init: Callable[[int], Any] | None):
        self.user_init = user_init

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
        _close_sockets()
        if self.user_init:
            self.user_init(number)


def _close_sockets() -> None:
    """Other processes detect the parent's death by the end of its sockets, which must not stay open here."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.dup2(null, int(name))  # closed, but its number is not reused
        except OSError:
            continue  # the handle of the listing itself
    os.close(null)


def _shm_is_large() -> bool:
    try:
        return shutil.disk_usage("/dev/shm").total >= SHM_BYTES
    except OSError:
        return False


def _identity(rows: Any) -> Any:
    return rows


class _Bytes:
    """A tensor as bytes, to be pickled through a pipe."""

    def __init__(self, tensor: torch.Tensor):
        self.bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        self.dtype, self.shape = tensor.dtype, tensor.shape

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.bytes).view(self.dtype).view(self.shape)


def _as_bytes(rows: Any) -> Any:
    return _mapped(rows, torch.Tensor, _Bytes)


def _mapped(rows: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    if isinstance(rows, kind):
        return function(rows)
    if type(rows) is dict:
        return {key: _mapped(value, kind, function) for key, value in rows.items()}
    if type(rows) in (list, tuple):
        return type(rows)(_mapped(value, kind, function) for value in rows)
    if isinstance(rows, tuple) and hasattr(rows, "_fields"):
        return type(rows)(*(_mapped(value, kind, function) for value in rows))
    return rows
