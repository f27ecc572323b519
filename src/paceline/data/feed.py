"""Global batches, dealt to whoever asks: a batch knows its samples, and fetches those of a seat.

A batch that must be computed again by other ranks is the same batch: only the seat changes. Sources
that draw their randomness from (seed, epoch, sample) may be fetched ahead of time in a thread; other
datasets are not, so that their use of global random state keeps its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from paceline.data import order
from paceline.data.order import Indices, Seat


class Source(Protocol):
    """Samples by index, as a tuple of tensors with the rows first."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Sequence[int], epoch: int) -> Any: ...


class Collated:
    """A map-style Dataset as a source."""

    def __init__(self, dataset: Dataset[Any]):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def fetch(self, indices: Sequence[int], epoch: int) -> Any:
        if type(self.dataset) is TensorDataset:
            return tuple(self.dataset[torch.as_tensor(list(indices))])
        return default_collate([self.dataset[int(i)] for i in indices])


def as_source(dataset: Any) -> Source:
    """Raises ValueError for what has neither ``fetch`` nor ``__getitem__`` and ``__len__``."""
    if hasattr(dataset, "fetch"):
        return dataset  # type: ignore[no-any-return]
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return Collated(dataset)
    raise ValueError(
        f"batches() needs a dataset with __len__ and __getitem__, got {type(dataset).__name__}; wrap lists of "
        f"tensors in torch.utils.data.TensorDataset"
    )


class Batch:
    """One global batch. ``weight``: its number of rows, known before anybody computes."""

    def __init__(self, source: Source, indices: Indices, epoch: int, step: int, num_steps: int):
        self.source, self.indices, self.epoch, self.step, self.num_steps = (
            source,
            indices,
            epoch,
            step,
            num_steps,
        )
        self.weight = float(len(indices))
        self._ahead: tuple[Seat, Future[Any]] | None = None

    @property
    def ends_epoch(self) -> bool:
        return self.step == self.num_steps - 1

    def share(self, seat: Seat) -> Any:
        """The seat's rows, or None if it has none."""
        if self._ahead and self._ahead[0] == seat:
            return self._ahead[1].result()
        return self._fetch(seat)

    def fetch_ahead(self, seat: Seat, pool: ThreadPoolExecutor) -> None:
        self._ahead = seat, pool.submit(self._fetch, seat)

    def _fetch(self, seat: Seat) -> Any:
        rows = seat.rows(len(self.indices))
        if not rows:
            return None
        return self.source.fetch(self.indices[rows.start : rows.stop].tolist(), self.epoch)


class Given:
    """Rows that the user brought: they are this process's share, and cannot be dealt to another."""

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
    start: tuple[int, int] = (0, 0),
    workers: int = 0,
) -> Iterator[Batch]:
    """Every global batch of every epoch, some of them already being fetched for ``seat``."""
    source = as_source(dataset)
    size = len(source)
    if not size:
        raise ValueError("the dataset is empty; give at least one sample")
    steps = order.num_steps(size, batch_size)

    def plain() -> Iterator[Batch]:
        for epoch in range(start[0], epochs):
            samples = order.permutation(seed, epoch, size) if shuffle else torch.arange(size).numpy()
            for step in range(start[1] if epoch == start[0] else 0, steps):
                yield Batch(source, order.window(samples, step, batch_size), epoch, step, steps)

    if isinstance(source, Collated):
        yield from plain()
        return
    queue: list[Batch] = []
    with ThreadPoolExecutor(1, "paceline feed") as pool:
        for batch in plain():
            batch.fetch_ahead(seat, pool)
            queue.append(batch)
            if len(queue) > ahead:
                yield queue.pop(0)
        yield from queue
