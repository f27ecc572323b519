"""Photographs of three classes, whole and broken, drawn by numbers."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
from PIL import Image

SHARD_BYTES = 20_000  # several shards of them


def photo(path: Path, seed: int = 0, size: tuple[int, int] = (90, 70), **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), np.uint8)
    Image.fromarray(coarse).resize(size).save(path, **options)
    return path


def lay(root: Path) -> Path:
    for label, name in enumerate(("ant", "bee", "cat")):
        for i in range(10 + label):
            photo(root / name / f"{i:02}.{'png' if i % 3 == 0 else 'jpg'}", 100 * label + i, (70 + i, 90))
    return root


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def add_broken(root: Path) -> dict[str, str]:
    """Files that are no images, and the reasons."""
    whole, grown = photo(root / "ant" / "whole.jpg").read_bytes(), io.BytesIO()
    Image.new("F", (9, 9)).save(grown, "TIFF")
    broken = {
        "ant/cut.jpg": (whole[: len(whole) // 2], "truncated"),
        "ant/empty.png": (b"", "empty"),
        "bee/fractions.png": (grown.getvalue(), "mode F"),
        "bee/text.jpg": (b"hello", "no image"),
        "cat/cut.png": (photo(root / "cat" / "whole.png").read_bytes()[:500], "truncated"),
    }
    for name, (data, _) in broken.items():
        (root / name).write_bytes(data)
    return {name: reason for name, (_, reason) in broken.items()}
