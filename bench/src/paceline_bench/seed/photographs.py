"""A folder of images in three classes, as large as is asked for: what the seed's two data sets look like to a program.

Theirs are not public. These are JPEG files of 320x240 with a texture of their class, so that they are decoded, cropped,
scaled and flipped as photographs are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = "fire", "smoke", "neither"
SIZE = 320, 240
QUALITY = 90
TEST = 3  # images of each class: a folder has a test part


def write(folder: Path, count: int, seed: int = 0) -> Path:
    """``count`` images to train on, by turns of each class. A folder that has them already is left as it is."""
    for part, images in (("train", count), ("test", TEST * len(CLASSES))):
        for i in range(images):
            name = CLASSES[i % len(CLASSES)]
            path = folder / part / name / f"{i:06d}.jpg"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                _image(np.random.default_rng((seed, part == "test", i)), i % len(CLASSES)).save(path, quality=QUALITY)
    return folder


def _image(dice: np.random.Generator, label: int) -> Image.Image:
    """Coarse spots in a colour, finer with each class, and grain."""
    edge = 5 * 2**label
    spots = Image.fromarray(dice.integers(0, 256, (edge, edge, 3), np.uint8)).resize(SIZE, Image.Resampling.BICUBIC)
    grain = dice.normal(0, 12, (SIZE[1], SIZE[0], 1))
    tint = 40 * np.eye(3)[label]
    return Image.fromarray(np.clip(np.asarray(spots) + grain + tint, 0, 255).astype(np.uint8))
