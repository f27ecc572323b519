"""Encoded images by index, as batches of 224x224: the base class of folders and shards.

*Invariant*: a sample's pixels depend only on (seed, epoch, index) and its bytes, not on the process or thread.
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

MAX_LISTED = 20  # errors listed one by one


class EncodedImages:
    """Images are decoded when fetched, by ``threads`` threads (None: one per core this process may use)."""

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
        """The file that contains the image."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """The location of the image, for error messages."""
        return self.path(index)

    def identities(self) -> Iterable[str]:
        """A text that identifies each image, independent of the folder's location."""
        raise NotImplementedError

    def digests(self) -> dict[str, str]:
        """Digests that must be equal on all machines: of the labels, and of the images' `identities`."""
        labels, images = hashlib.sha256(repr(self.classes).encode()), hashlib.sha256()
        labels.update(self._labels.numpy().tobytes())
        for text in self.identities():
            images.update(text.encode("utf8", "surrogateescape") + b"\0")
        return {"classes and labels": labels.hexdigest(), f"images ({type(self).__name__})": images.hexdigest()}

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, indices: Sequence[int], epoch: int) -> tuple[Tensor, Tensor]:
        """*Shapes*: (n, 3, 224, 224) float32, (n,) int64. Raises ValueError naming every unreadable image."""
        images = torch.empty(len(indices), 3, decode.CROP, decode.CROP)
        arrays = images.numpy()
        errors: set[str] = set()

        def load(position: int) -> None:
            index = int(indices[position])
            try:
                pixels = decode.decode(self.data(index))
                decode.normalise(decode.crop(pixels, self._random_words(epoch, index)), arrays[position])
            except Exception as error:  # decoders of damaged files raise almost anything
                errors.add(f"- {self.name(index)}: {error}")

        threads = 1 if get_worker_info() else self.threads  # one of several processes has one core
        if threads > 1 < len(indices):
            with ThreadPoolExecutor(min(threads, len(indices))) as pool:
                list(pool.map(load, range(len(indices))))
        else:
            for position in range(len(indices)):
                load(position)
        if errors:
            summary = f"cannot read {len(errors)} of {len(indices)} images"
            raise ValueError(f"{summary}:\n{listing(errors)}\n{self._remedy()}")
        return images, self._labels[torch.as_tensor(indices, dtype=torch.int64)]

    def _remedy(self) -> str:
        return "Remove these files, create them again, or leave all such out with skip_broken (--skip-broken)."

    def _random_words(self, epoch: int, index: int) -> list[int] | None:
        if not self._train:
            return None
        # NumPy guarantees SeedSequence's output for all versions, but not that of its generators' methods
        words: list[int] = np.random.SeedSequence((self._seed, epoch, index)).generate_state(3).tolist()
        return words


def listing(errors: set[str]) -> str:
    """Up to MAX_LISTED errors, a line for each, and how many more there are."""
    shown = sorted(errors)[:MAX_LISTED]
    more = len(errors) - len(shown)
    return "\n".join(shown) + (f"\n... and {more} more" if more else "")
