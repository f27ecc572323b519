"""The user's images: a folder with one sub-folder per class, or the shards that `pack` made of one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.data import image_folder as folders
from paceline.data import shards
from paceline.data.decode import MEAN, STD
from paceline.data.encoded_images import EncodedImages
from paceline.data.image_folder import Part, Progress

__all__ = ["MEAN", "STD", "ImageFolder", "load"]


class ImageFolder(EncodedImages):
    """Images read from their files."""

    def __init__(
        self,
        paths: Sequence[Path | str],
        labels: Sequence[int],
        classes: Sequence[str],
        train: bool,
        seed: int,
        threads: int | None = None,
    ):
        super().__init__(labels, classes, train, seed, threads)
        self.paths = paths

    def data(self, index: int) -> bytes:
        with open(self.paths[index], "rb") as file:
            return file.read()

    def path(self, index: int) -> str:
        return str(self.paths[index])

    def identities(self) -> Iterable[str]:
        return ("/".join(str(path).rsplit("/", 2)[-2:]) for path in self.paths)


def load(
    folder: Path | str,
    test_fraction: float = 0.2,
    seed: int = 0,
    threads: int | None = None,
    *,
    skip_broken: bool = False,
    progress: Progress | None = None,
) -> tuple[EncodedImages, EncodedImages]:
    """The training and the test images: those of train/ and test/ or val/, else split class by class; or of shards.

    ``skip_broken`` decodes every image once for each state of the folder and leaves out the broken ones, which are
    in ``skipped`` of the first result, with the reasons. By default no image is opened. Shards keep the split with
    which they were packed. Raises ValueError with all problems of the folder.
    """
    root = Path(folder)
    if shards.packed(root):
        return shards.load(root, seed, threads)
    train, test = folders.find(root, test_fraction, seed)
    broken: dict[str, str] = {}
    if skip_broken:
        names = folders.members(train) + folders.members(test)
        # sorted, so that the cached result does not depend on the split
        broken = folders.cached_check(root, sorted(names), threads or len(os.sched_getaffinity(0)), progress)
        if broken:
            train, test = folders.find(root, test_fraction, seed, broken)
    sources = _source(root, train, True, seed, threads), _source(root, test, False, seed, threads)
    sources[0].skipped = broken
    return sources


def divides(folder: Path | str) -> bool:
    """Whether `load` itself chooses the test images."""
    root = Path(folder)
    own = (root / "train").is_dir() and any((root / name).is_dir() for name in ("test", "val"))
    return not own and not shards.packed(root)


def _source(root: Path, found: Part, train: bool, seed: int, threads: int | None) -> ImageFolder:
    labels = [label for label, names in enumerate(found.values()) for _ in names]
    return ImageFolder(
        [f"{root}/{name}" for name in folders.members(found)], labels, tuple(found), train, seed, threads
    )
