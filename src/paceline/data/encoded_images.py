"""Encoded images by index, as batches of 224x224: what folders and shards have in common.

*Law*: a sample's pixels follow from (seed, epoch, index) and its bytes alone, whichever process or thread reads it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from paceline.data import decode

LISTED = 20  # faults told one by one


class Pictures:
    """Decoded when fetched, by ``threads`` threads (None: one per core this process may use)."""

    packed = False

    def __init__(self, labels: Any, classes: Sequence[str], train: bool, seed: int, threads: int | None = None):
        self.classes = tuple(classes)
        self.skipped: dict[str, str] = {}  # broken files left out, and why
        self._labels = torch.as_tensor(labels, dtype=torch.int64)
        self._train = train
        self._seed = seed
        self.threads = threads or len(os.sched_getaffinity(0))

    def data(self, index: int) -> bytes:
        """The encoded image."""
        raise NotImplementedError

    def path(self, index: int) -> str:
        """The file in which it lies."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Where it lies, for errors."""
        return self.path(index)

    def said(self) -> Iterable[str]:
        """What each image is, wherever its folder lies."""
        raise NotImplementedError

    def digests(self) -> dict[str, str]:
        """What several machines must have alike: labels, and images, which folders and shards name each in its way."""
        labels, images = hashlib.sha256(repr(self.classes).encode()), hashlib.sha256()
        labels.update(self._labels.numpy().tobytes())
        for words in self.said():
            images.update(words.encode("utf8", "surrogateescape") + b"\0")
        return {"classes and labels": labels.hexdigest(), f"images ({type(self).__name__})": images.hexdigest()}

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, indices: Sequence[int], epoch: int) -> tuple[Tensor, Tensor]:
        """*Shapes*: (n, 3, 224, 224) float32, (n,) int64. Raises ValueError naming every unreadable image."""
        images = torch.empty(len(indices), 3, decode.CROP, decode.CROP)
        places = images.numpy()
        faults: set[str] = set()

        def place(slot: int) -> None:
            index = int(indices[slot])
            try:
                pixels = decode.decode(self.data(index))
                decode.normalise(decode.crop(pixels, self._words(epoch, index)), places[slot])
            except Exception as error:  # decoders of damaged files raise almost anything
                faults.add(f"- {self.name(index)}: {error}")

        threads = 1 if get_worker_info() else self.threads  # one of several processes has one core
        if threads > 1 < len(indices):
            with ThreadPoolExecutor(min(threads, len(indices))) as pool:
                list(pool.map(place, range(len(indices))))
        else:
            for slot in range(len(indices)):
                place(slot)
        if faults:
            what = f"cannot read {len(faults)} of {len(indices)} images"
            raise ValueError(f"{what}:\n{listing(faults)}\n{self._remedy()}")
        return images, self._labels[torch.as_tensor(indices, dtype=torch.int64)]

    def _remedy(self) -> str:
        return "Remove these files, create them again, or leave all such out with skip_broken (--skip-broken)."

    def _words(self, epoch: int, index: int) -> list[int] | None:
        if not self._train:
            return None
        # NumPy promises SeedSequence's output for ever; it does not promise its generators' methods
        words: list[int] = np.random.SeedSequence((self._seed, epoch, index)).generate_state(3).tolist()
        return words


def listing(faults: set[str]) -> str:
    """A line each, in order, and how many more there are."""
    shown = sorted(faults)[:LISTED]
    more = len(faults) - len(shown)
    return "\n".join(shown) + (f"\n... and {more} more" if more else "")
