"""Worker processes that prefetch samples in the order in which they will be needed.

Before each sample that a dataset makes itself the global generators are seeded from (seed, epoch, index), so
its random changes do not depend on which process makes it.
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

from paceline.data.rng import OwnRng, seed_all
from paceline.data.sources import Collated, Source, Stream, together

SHM_BYTES = 1 << 30  # with less shared memory than this (containers have 64 MB) rows travel through pipes


class Rows:
    """torch's DataLoader as a queue: what ``dataset`` gives for each request, or all that it gives."""

    def __init__(
        self, dataset: Dataset[Any], requests: Iterable[Any] | None, num_processes: int, options: dict[str, Any]
    ):
        settings = {"multiprocessing_context": "fork", **options}
        settings["worker_init_fn"] = _Beginning(settings.get("worker_init_fn"))
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=requests,
            num_workers=num_processes,
            generator=torch.Generator(),  # not the global one, which is the training's
            collate_fn=_as_is if _has_room() else _to_pipe,
            **settings,
        )
        self._rows: Iterator[Any] | None = iter(loader)
        self._taken: tuple[int, Any] = -1, None

    def __next__(self) -> Any:
        if self._rows is None:
            raise StopIteration
        try:
            return _mapped(next(self._rows), _Bytes, _Bytes.tensor)
        except BaseException:
            self.close()
            raise

    def has(self, number: int) -> bool:
        """Whether the rows of this request are here or will come."""
        return self._rows is not None and number >= self._taken[0]

    def take(self, number: int) -> Any:
        """The rows of a request; those before it are dropped."""
        while self._taken[0] < number:
            self._taken = self._taken[0] + 1, next(self)
        return self._taken[1]

    def close(self) -> None:
        """Ends the processes."""
        # a traceback may hold the iterator, whose own end would come too late
        if shut_down := getattr(self._rows, "_shutdown_workers", None):
            shut_down()
        self._rows = None


class Seeded(Dataset[Any]):
    """A source whose samples do not depend on which process makes them. Asked by a process with (epoch, indices)."""

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
        return together(items, source.collate)

    def __len__(self) -> int:
        return len(self.source)


class Windows(IterableDataset[Any]):
    """(epoch, step, samples) of every global batch of a stream. Resuming reads what was used before and drops it."""

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
                used = step * self.batch_size
                found = sum(1 for _ in zip(range(used), items, strict=False))
            if found <= used - self.batch_size:
                raise ValueError(
                    f"the stream ended after {found} samples, {used} were used before; resume with the dataset and "
                    f"batch size that the position was saved with"
                )
            window: list[Any] = [None] * self.batch_size
            while len(window) == self.batch_size:
                with generator:
                    window = [item for _, item in zip(range(self.batch_size), items, strict=False)]
                found += len(window)
                if len(window) == self.batch_size or (window and not self.drop_last):
                    yield epoch, step, window
                step += 1
            if found < (self.batch_size if self.drop_last else 1):
                raise ValueError(f"the stream gave {found} samples in epoch {epoch}; one batch is the least")


class _Beginning:
    """What a process does first."""

    def __init__(self, then: Callable[[int], Any] | None):
        self.then = then

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
        _let_go_of_sockets()
        if self.then:
            self.then(number)


def _let_go_of_sockets() -> None:
    """Others learn of its parent's death by the end of a socket, which must not live on here."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.dup2(nothing, int(name))  # closed, and its number not given to anything else
        except OSError:
            continue  # the listing's own
    os.close(nothing)


def _has_room() -> bool:
    try:
        return shutil.disk_usage("/dev/shm").total >= SHM_BYTES
    except OSError:
        return False


def _as_is(rows: Any) -> Any:
    return rows


class _Bytes:
    """A tensor as it goes through a pipe."""

    def __init__(self, tensor: torch.Tensor):
        self.bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        self.dtype, self.shape = tensor.dtype, tensor.shape

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.bytes).view(self.dtype).view(self.shape)


def _to_pipe(rows: Any) -> Any:
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
