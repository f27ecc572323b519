"""A folder of images, one sub-folder per class, as 224x224 colour images.

Prepared as in Lerat, Mahmoudi and Mahmoudi, Electronics 11(10):1525 (2022): the short side becomes 256, a
crop of 224x224 is kept (random in training, else central), training images are mirrored half the time,
and channels are normalised by ImageNet's mean and deviation.
*Law*: a sample's pixels follow from (seed, epoch, index) alone, whichever process or thread reads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

SHORT_SIDE, CROP = 256, 224  # pixels
MEAN = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
STD = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)
SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp")
LAYOUT = (
    "Accepted: a folder with one sub-folder per class, two classes or more, each with images "
    f"({', '.join(SUFFIXES)}); or a folder with train/ and test/ (or val/), each laid out so."
)


class ImageFolder:
    """Images read when fetched, by ``threads`` threads (None: one per core this process may use)."""

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Sequence[int],
        classes: Sequence[str],
        train: bool,
        seed: int,
        threads: int | None = None,
    ):
        self.classes = tuple(classes)
        self.paths = paths
        self._labels = torch.as_tensor(labels, dtype=torch.int64)
        self._train = train
        self._seed = seed
        self._threads = threads or len(os.sched_getaffinity(0))

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: Sequence[int], epoch: int) -> tuple[Tensor, Tensor]:
        """*Shapes*: (n, 3, 224, 224) float32, (n,) int64. Raises ValueError naming every unreadable image."""
        pixels = np.empty((len(indices), CROP, CROP, 3), np.uint8)
        faults: set[str] = set()

        def place(slot: int) -> None:
            path = self.paths[indices[slot]]
            words = self._words(epoch, indices[slot]) if self._train else None
            try:
                pixels[slot] = _read(path, words)
            except Exception as error:  # decoders of damaged files raise almost anything
                faults.add(f"- {path}: {error}")

        if self._threads > 1 < len(indices):
            with ThreadPoolExecutor(min(self._threads, len(indices))) as pool:
                list(pool.map(place, range(len(indices))))
        else:
            for slot in range(len(indices)):
                place(slot)
        if faults:
            listing = "\n".join(sorted(faults))
            raise ValueError(
                f"cannot read {len(faults)} of {len(indices)} images:\n{listing}\n"
                "Accepted: complete images of 8 bits per channel. Remove these files or create them again."
            )
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float().div_(255)
        return images.sub_(MEAN).div_(STD), self._labels[torch.as_tensor(indices, dtype=torch.int64)]

    def _words(self, epoch: int, index: int) -> list[int]:
        # NumPy promises SeedSequence's output for ever; it does not promise its generators' methods
        words: list[int] = np.random.SeedSequence((self._seed, epoch, index)).generate_state(3).tolist()
        return words


def load(
    folder: Path | str, test_fraction: float = 0.2, seed: int = 0, threads: int | None = None
) -> tuple[ImageFolder, ImageFolder]:
    """The training and the test images: those of train/ and test/ or val/, else split class by class.

    Raises ValueError listing all that is wrong with the folder. No image is opened.
    """
    root = Path(folder)
    faults = []
    if not 0 < test_fraction < 1:
        faults.append(f"test_fraction is {test_fraction}; give a number between 0 and 1, as in 0.2")
    if seed < 0:
        faults.append(f"seed is {seed}; give 0 or more")
    train: dict[str, list[Path]] = {}
    test: dict[str, list[Path]] = {}
    held_out = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    if not root.is_dir():
        faults.append("there is no such folder; check the path")
    elif held_out is not None and (root / "train").is_dir():
        train, test = _scan(root / "train"), _scan(held_out)
        faults += _faults("train/", train) + _faults(f"{held_out.name}/", test)
        if odd := sorted(train.keys() ^ test.keys()):
            faults.append(f"classes in one of train/ and {held_out.name}/ alone: {', '.join(odd)}; add or remove")
    else:
        train = _scan(root)
        faults += _faults("it", train)
        if lone := [name for name, paths in train.items() if len(paths) == 1]:
            faults.append(f"classes with one image, which cannot be split: {', '.join(lone)}; add images")
        if not faults:
            train, test = _split(train, test_fraction, seed)
    if faults:
        listing = "\n".join(f"- {fault}" for fault in faults)
        raise ValueError(f"cannot take images from {root}:\n{listing}\n{LAYOUT}")
    return _source(train, True, seed, threads), _source(test, False, seed, threads)


def _source(found: Mapping[str, list[Path]], train: bool, seed: int, threads: int | None) -> ImageFolder:
    paths = [path for members in found.values() for path in members]
    labels = [label for label, members in enumerate(found.values()) for _ in members]
    return ImageFolder(paths, labels, tuple(found), train, seed, threads)


def _scan(folder: Path) -> dict[str, list[Path]]:
    """Classes and their images by name. Hidden entries are left out: tools leave thumbnails and the like."""
    return {
        name: [
            folder / name / image
            for image in sorted(entry.name for entry in os.scandir(folder / name) if entry.is_file())
            if image.lower().endswith(SUFFIXES) and not image.startswith(".")
        ]
        for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        if not name.startswith(".")
    }


def _faults(where: str, found: Mapping[str, list[Path]]) -> list[str]:
    empty = [name for name, paths in found.items() if not paths]
    faults = []
    if not found:
        faults.append(f"{where} has no class sub-folders; make one per class and move the images there")
    elif len(found) == 1:
        faults.append(f"{where} has only one class, {next(iter(found))}; add a sub-folder for another")
    if empty and len(empty) == len(found):
        faults.append(f"{where} has no images in any of its {len(found)} sub-folders; add images")
    elif empty:
        faults.append(f"{where} has classes without images: {', '.join(empty)}; add images or remove these")
    return faults


def _split(
    found: Mapping[str, list[Path]], test_fraction: float, seed: int
) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """Every class keeps at least one image on either side."""
    train, test = {}, {}
    for position, (name, paths) in enumerate(found.items()):
        keys = np.random.SeedSequence((seed, position)).generate_state(len(paths), np.uint64)
        num_test = min(max(round(len(paths) * test_fraction), 1), len(paths) - 1)
        chosen = set(np.argsort(keys, kind="stable")[:num_test].tolist())
        train[name] = [path for at, path in enumerate(paths) if at not in chosen]
        test[name] = [path for at, path in enumerate(paths) if at in chosen]
    return train, test


def _read(path: Path, words: Sequence[int] | None) -> npt.NDArray[Any]:
    """*Shapes*: (224, 224, 3) uint8. ``words``: 32 random bits each for column, row, mirroring, or None."""
    if path.stat().st_size == 0:
        raise ValueError("the file is empty")
    with Image.open(path) as file:
        width, height = (SHORT_SIDE * side // min(file.size) for side in file.size)
        file.draft("RGB", (width, height))  # a large JPEG is decoded at a half, quarter or eighth
        image = _to_rgb(file)
    if words is None:
        left, top, mirrored = (width - CROP) // 2, (height - CROP) // 2, False
    else:
        left, top = words[0] * (width - CROP + 1) >> 32, words[1] * (height - CROP + 1) >> 32
        mirrored = words[2] >> 31 == 1
    # resizing the crop's box alone gives the pixels of resizing all and cropping then
    across, down = image.width, image.height
    box = (
        left * across / width,
        top * down / height,
        (left + CROP) * across / width,
        (top + CROP) * down / height,
    )
    pixels = np.asarray(image.resize((CROP, CROP), Image.Resampling.BILINEAR, box))
    return pixels[:, ::-1] if mirrored else pixels


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise ValueError(f"pixels of mode {image.mode} have more than 8 bits, which would be clipped")
    if image.mode == "P":
        image = image.convert("RGBA")  # palettes may hold transparency, which RGB alone warns about
    return image.convert("RGB")
