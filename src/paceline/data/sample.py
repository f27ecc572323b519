"""The embedded sample data: 6000 training and 1500 test images of clothing, 28x28 grey, three classes.

A part of Fashion-MNIST; paceline/train/sample/README.md describes how it was made. It is for first runs and tests:
no download, trained in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

CLASSES = ("Trouser", "Dress", "Bag")
# of all pixels of the training images, scaled to [0, 1]
MEAN, STD = 0.279202, 0.359081


class Sample:
    """One part of the sample. There is no augmentation: every epoch has the same images."""

    classes: tuple[str, ...] = CLASSES

    def __init__(self, images: Tensor, labels: Tensor):
        """*Shapes*: images (n, 1, 28, 28) uint8, labels (n,) int64."""
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, indices: Sequence[int], epoch: int) -> tuple[Tensor, Tensor]:
        """*Shapes*: (n, 1, 28, 28) float32 of mean 0 and deviation 1 over the training part, (n,) int64."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return self._images[chosen].float().div_(255).sub_(MEAN).div_(STD), self._labels[chosen]


def load() -> tuple[Sample, Sample]:
    """The training part and the test part."""
    return _part("train"), _part("test")


def _part(name: str) -> Sample:
    with (files("paceline.train") / "sample" / f"{name}.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        return Sample(torch.from_numpy(arrays["images"])[:, None], torch.from_numpy(arrays["labels"]).long())
