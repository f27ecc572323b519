"""Order and worker processes of a user's DataLoader, checked before any sample is read.

Its dataset, collate_fn, drop_last and worker options are used. A sequential, random or distributed sampler is replaced
by this package's order, which is the same for any number of processes. Any other sampler or batch sampler is listed
once per epoch after seeding with (seed, epoch), so every process gets the same list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from paceline.data import sampler as order
from paceline.data.rng import OwnRng
from paceline.data.sampler import Indices

# the options that are passed on to the worker processes
WORKER_OPTIONS = ("multiprocessing_context", "prefetch_factor", "timeout", "worker_init_fn")


@dataclass
class Order:
    """The global batches of an epoch, as indices. ``sampler``: the user's sampler of indices or of batches."""

    size: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool = False
    sampler: Any = None
    gives_batches: bool = False

    def epoch(self, epoch: int) -> tuple[int, Iterator[Indices]]:
        """The number of batches, and the batches."""
        if self.gives_batches:
            drawn = [np.asarray(batch, dtype=np.int64) for batch in self._draw(epoch)]
            if any(not 0 < len(batch) <= self.batch_size for batch in drawn):
                raise ValueError(
                    f"the DataLoader's batch_sampler gave batches of {min(map(len, drawn))} to {max(map(len, drawn))} "
                    f"samples, the job's batch_size is {self.batch_size}; give join() the largest, and no empty ones"
                )
            return len(drawn), iter(drawn)
        if self.sampler is not None:
            samples = np.asarray(self._draw(epoch), dtype=np.int64)
        elif self.shuffle:
            samples = order.permutation(self.seed, epoch, self.size)
        else:
            samples = np.arange(self.size)
        steps = len(samples) // self.batch_size if self.drop_last else order.num_steps(len(samples), self.batch_size)
        return steps, (order.window(samples, step, self.batch_size) for step in range(steps))

    def _draw(self, epoch: int) -> list[Any]:
        samplers = [each for each in (self.sampler, getattr(self.sampler, "sampler", None)) if each is not None]
        with OwnRng(self.seed, epoch):
            for sampler in samplers:
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                if getattr(sampler, "generator", None) is not None:
                    sampler.generator.manual_seed(int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0]))
            return list(self.sampler)


def order_of(loader: DataLoader[Any], size: int, batch_size: int, seed: int, times: int = 1) -> Order:
    """``times``: the job's batch size over the loader's. Raises ValueError where they do not match."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        return Order(size, batch_size, seed, False, False, loader.batch_sampler, True)
    check_batch_size(loader, batch_size, times)
    sampler, shuffle = _sampler_of(loader, size)
    return Order(size, batch_size, seed, shuffle, loader.drop_last, sampler)


def samples_of(loader: DataLoader[Any], size: int) -> Indices:
    """The samples that the loader gives of a dataset of ``size``, in the same order in every process, for a sum."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        _, drawn = Order(size, size, 0, False, False, loader.batch_sampler, True).epoch(0)
        return np.concatenate([np.zeros(0, np.int64), *drawn])
    sampler, _ = _sampler_of(loader, size)
    chosen: Iterable[int] = range(size) if sampler is None else Order(size, size, 0, False, False, sampler)._draw(0)
    return np.asarray(chosen, dtype=np.int64)


def _sampler_of(loader: DataLoader[Any], size: int) -> tuple[Any, bool]:
    """The loader's sampler, or None where that gives every sample once; and whether it shuffles."""
    sampler: Any = loader.sampler
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size:
        return None, True
    if type(sampler) is DistributedSampler:
        return None, sampler.shuffle
    return (None if type(sampler) is SequentialSampler else sampler), False


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The loader's options for its worker processes."""
    return {name: value for name in WORKER_OPTIONS if (value := getattr(loader, name)) is not None}


def check_batch_size(loader: DataLoader[Any], batch_size: int, times: int = 1) -> None:
    if loader.batch_size is None:
        raise ValueError(
            f"the DataLoader has batch_size=None, so its dataset gives whole batches, which cannot be divided; give it "
            f"single samples and batch_size={batch_size}, or call pace.step with each process's own samples"
        )
    if loader.batch_size * times != batch_size:
        raise ValueError(
            f"the DataLoader has batch_size={loader.batch_size}, the job {batch_size}, which is the global batch over "
            f"all processes; give both the same, or pass loader.dataset"
        )
