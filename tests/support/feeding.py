"""Datasets and streams that draw at random, and all that ranks read of them."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from paceline.data.batches import batches
from paceline.data.sampler import Assignment


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


def seats(num_nodes: int) -> list[Assignment]:
    return [Assignment(node, num_nodes) for node in range(num_nodes)]


def run(dataset, batch_size=4, epochs=2, assignment=None, **options):
    """Every batch as (epoch, step, ends_epoch, samples of the seat)."""
    assignment = assignment or Assignment()
    return [
        (b.epoch, b.step, b.ends_epoch, [] if (rows := b.share(assignment)) is None else rows[0].tolist())
        for b in batches(dataset, batch_size, epochs, 7, assignment, **options)
    ]


def whole(dataset, num_nodes, **options):
    """What all nodes together read, batch by batch."""
    of_node = [run(dataset, assignment=assignment, **options) for assignment in seats(num_nodes)]
    return [
        (*together[0][:3], [sample for part in together for sample in part[3]])
        for together in zip(*of_node, strict=True)
    ]
