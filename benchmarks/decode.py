"""JPEG photographs (500x375) to training batches: images/s of one core, against Pillow in a DataLoader.

    python benchmarks/decode.py [--images 400 --rounds 9 --out benchmarks/DATE_MACHINE_decode]

One process pinned to one core; the baseline is the better of a DataLoader in the process and one with a process of
its own on the same core. Rounds are interleaved, the first is dropped; the interval is that of the mean ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from paceline.data import decode, images
from paceline.data.order import permutation

T90 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76)  # of 1, 2, ... degrees


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


class Plain(Dataset):
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


def of_loader(loader: DataLoader) -> int:
    return sum(len(rows) for rows, _ in loader)


def of_ours(source: images.ImageFolder, batch_size: int, epoch: int) -> int:
    order = permutation(0, epoch, len(source)).tolist()
    starts = range(0, len(order), batch_size)
    return sum(len(source.fetch(order[start : start + batch_size], epoch)[0]) for start in starts)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    mean = statistics.fmean(ratios)
    if len(ratios) < 2:
        return mean, float("nan"), float("nan")
    half = T90[min(len(ratios) - 1, len(T90)) - 1] * statistics.stdev(ratios) / len(ratios) ** 0.5
    return mean, mean - half, mean + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.sched_setaffinity(0, {given.core})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.jpg" for number in range(given.images)]
        for number, path in enumerate(paths):
            photograph(path, number)
        ours = images.ImageFolder(paths, [0] * len(paths), ("a",), True, 0, threads=1)
        size = statistics.fmean(path.stat().st_size for path in paths)
        print(f"{len(paths)} JPEGs of 500x375, {size / 1e3:.0f} kB each; simplejpeg: {decode.simplejpeg is not None}")
        contestants = {
            "DataLoader, in process": lambda epoch: of_loader(DataLoader(Plain(ours), given.batch_size, shuffle=True)),
            "DataLoader, one process": lambda epoch: of_loader(
                DataLoader(Plain(ours), given.batch_size, shuffle=True, num_workers=1)
            ),
            "paceline": lambda epoch: of_ours(ours, given.batch_size, epoch),
        }
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for epoch in range(given.rounds + 1):
            for name, run in contestants.items():
                start = time.perf_counter()
                count = run(epoch)
                rates[name].append(count / (time.perf_counter() - start))
    rates = {name: each[1:] for name, each in rates.items()}
    for name, each in rates.items():
        print(f"{name:24} {statistics.median(each):7.0f} images/s")
    *baselines, mine = rates.values()
    better = max(baselines, key=statistics.median)
    mean, low, high = interval([a / b for a, b in zip(mine, better, strict=True)])
    print(f"paceline against the better: {mean:.2f}x, 90 % interval {low:.2f} to {high:.2f}")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        facts = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "bytes": size}
        result = {**facts, "rates": rates, "ratio": mean, "low": low, "high": high, "settings": vars(given)}
        (given.out / "raw.json").write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
