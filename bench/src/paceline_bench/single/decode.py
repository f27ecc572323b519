"""JPEG photographs (500x375) to training batches: images/s of one core, against Pillow in a DataLoader.

The peer is the better of a DataLoader in the process and one with a process of its own on the same core.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from paceline.data import images
from paceline.data.sampler import permutation
from paceline_bench.result import Finding, Show
from paceline_bench.single.paired import Spread

BATCH = 32
DEMANDED = 1.5


def photograph(path: Path, seed: int) -> None:
    """Shapes of all sizes and the noise of a sensor; 60 to 130 kB, as photographs of this size have."""
    random, pixels = np.random.default_rng(seed), np.zeros((375, 500, 3), np.float32)
    for cells, height in ((3, 70), (9, 40), (30, 25), (100, 14)):
        coarse = random.normal(0, height, (cells * 3 // 4 + 1, cells + 1, 3)).astype(np.float32)
        for channel in range(3):
            plane = Image.fromarray(coarse[..., channel]).resize((500, 375), Image.Resampling.BICUBIC)
            pixels[..., channel] += np.asarray(plane)
    pixels += random.normal(0, 8, (375, 500, 1)) + 120
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


class Plain(Dataset[Any]):
    """As one writes it: open, resize the short side to 256, crop 224, flip, scale, normalise."""

    def __init__(self, source: images.ImageFolder):
        self.source = source
        self.mean, self.std = (each.view(3).numpy() for each in (images.MEAN, images.STD))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.source.paths[index]) as file:
            image = file.convert("RGB")
        short = min(image.size)
        image = image.resize((256 * image.width // short, 256 * image.height // short), Image.Resampling.BILINEAR)
        left, top = np.random.randint(image.width - 223), np.random.randint(image.height - 223)
        image = image.crop((left, top, left + 224, top + 224))
        if np.random.rand() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = (np.asarray(image, np.float32) / 255 - self.mean) / self.std
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), 0


def of_loader(loader: DataLoader[Any]) -> int:
    return sum(len(rows) for rows, _ in loader)


def of_ours(source: images.ImageFolder, batch_size: int, epoch: int) -> int:
    order = permutation(0, epoch, len(source)).tolist()
    starts = range(0, len(order), batch_size)
    return sum(len(source.fetch(order[start : start + batch_size], epoch)[0]) for start in starts)


def decode(rounds: int, show: Show, count: int = 300) -> Iterator[Finding]:
    """Images/s of one pinned core; by turns, the first turn of each is dropped."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            yield _raced(Path(folder), count, rounds, show)
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def _raced(folder: Path, count: int, rounds: int, show: Show) -> Finding:
    show("making photographs")
    paths = [folder / f"{number}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        photograph(path, number)
    ours = images.ImageFolder(paths, [0] * count, ("a",), True, 0, threads=1)
    contenders: dict[str, Callable[[int], int]] = {
        "DataLoader, in process": lambda epoch: of_loader(DataLoader(Plain(ours), BATCH, shuffle=True)),
        "DataLoader, one process": lambda epoch: of_loader(DataLoader(Plain(ours), BATCH, shuffle=True, num_workers=1)),
        "paceline": lambda epoch: of_ours(ours, BATCH, epoch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for epoch in range(rounds + 1):
        for name, run in contenders.items():
            show(f"decoding, round {epoch} of {rounds}: {name}")
            start = time.perf_counter()
            num_images = run(epoch)
            seconds[name].append((time.perf_counter() - start) / num_images)
    mine, peers = seconds["paceline"][1:], [each[1:] for name, each in seconds.items() if name != "paceline"]
    ratio = Spread.of_ratios(min(peers, key=statistics.median), mine)
    size_kb = statistics.fmean(path.stat().st_size for path in paths) / 1e3
    what = f"JPEG folder, 500x375 of {size_kb:.0f} kB, to 224x224 on one core against Pillow in a DataLoader"
    rates = (f"| {name} | {' '.join(f'{1 / each:.0f}' for each in every[1:])} |" for name, every in seconds.items())
    table = "\n".join(["| images/s, each round | |", "|---|---|", *rates])
    return Finding("decode", what, str(ratio), f">= {DEMANDED}", ratio.low >= DEMANDED, table)
