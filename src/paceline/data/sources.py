"""Data sources: turns a dataset, tensors or a DataLoader into a source of samples by index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

Collate = Callable[[list[Any]], Any]


class Source(Protocol):
    """Samples by index, collated: a tensor, or any nesting of tuples and dicts of tensors, with the samples first."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Sequence[int], epoch: int) -> Any: ...


class Collated:
    """A map-style Dataset, with its items collated as in a DataLoader."""

    def __init__(self, dataset: Dataset[Any], collate: Collate = default_collate):
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def reads_many(self) -> bool:
        """Whether the dataset gives several samples at once, by torch's ``__getitems__``."""
        dataset = self.dataset
        while type(dataset) is Subset:  # always has ``__getitems__``, but reads one by one if the dataset below does
            dataset = dataset.dataset
        return type(dataset) is TensorDataset or callable(getattr(dataset, "__getitems__", None))

    def fetch(self, indices: Sequence[int], epoch: int) -> Any:
        if type(self.dataset) is TensorDataset and self.collate is default_collate:
            return tuple(self.dataset[torch.as_tensor(list(indices))])
        chosen = [int(i) for i in indices]
        if callable(get_items := getattr(self.dataset, "__getitems__", None)):
            return collate_items(list(get_items(chosen)), self.collate)
        return collate_items([self.dataset[i] for i in chosen], self.collate)


class Stream:
    """An iterable dataset: samples in its own order, the same in every process; iterated anew in every epoch."""

    def __init__(self, dataset: Iterable[Any], collate: Collate = default_collate):
        self.dataset, self.collate = dataset, collate
        self._items: Iterator[Any] = iter(())
        self._next = -1

    def __len__(self) -> int:
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(
                f"{type(self.dataset).__name__} has no length, which is needed here; give it __len__, or use a dataset "
                f"with __getitem__ and __len__"
            ) from None

    def items(self, epoch: int) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return iter(self.dataset)

    def fetch(self, indices: Sequence[int], epoch: int) -> Any:
        """Ascending indices are read in one pass; a smaller index starts a new pass."""
        found = []
        for index in indices:
            if index < self._next or self._next < 0:
                self._items, self._next = self.items(epoch), 0
            for _ in range(index - self._next):
                next(self._items)
            found.append(next(self._items))
            self._next = index + 1
        return collate_items(found, self.collate)


class Window:
    """Samples that are already in memory."""

    def __init__(self, items: list[Any], collate: Collate):
        self.items, self.collate = items, collate

    def __len__(self) -> int:
        return len(self.items)

    def fetch(self, indices: Sequence[int], epoch: int) -> Any:
        return collate_items([self.items[i] for i in indices], self.collate)


def collate_items(items: list[Any], collate: Collate) -> Any:
    """Collates; where default_collate turns a tuple into a list, the result is a tuple again."""
    rows = collate(items)
    return tuple(rows) if isinstance(rows, list) and items and isinstance(items[0], tuple) else rows


def as_source(dataset: Any) -> Source:
    """A dataset, DataLoader, iterable dataset or source as a source. Raises ValueError for anything else."""
    if isinstance(dataset, DataLoader):
        collate = dataset.collate_fn
        return Stream(dataset.dataset, collate) if _is_stream(dataset.dataset) else Collated(dataset.dataset, collate)
    if hasattr(dataset, "fetch"):
        return dataset  # type: ignore[no-any-return]
    if _is_stream(dataset):
        return Stream(dataset)
    if isinstance(dataset, tuple) and dataset and all(isinstance(item, Tensor | np.ndarray) for item in dataset):
        raise ValueError(
            f"batches() got a tuple of {len(dataset)} tensors, which would be {len(dataset)} samples; wrap them as "
            f"torch.utils.data.TensorDataset(*tensors)"
        )
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, Mapping | str):
        return Collated(dataset)
    raise ValueError(
        f"batches() needs a dataset with __len__ and __getitem__, a DataLoader, or an iterable that begins anew each "
        f"time, got {type(dataset).__name__}; wrap tensors in torch.utils.data.TensorDataset"
    )


def _is_stream(dataset: Any) -> TypeGuard[Iterable[Any]]:
    if isinstance(dataset, IterableDataset):
        return True
    # an iterator, such as a generator, ends with its first epoch and cannot be resumed
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__next__")
