"""Advice on the input pipeline: whether packing or more decoding processes would help, from measured times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np

from paceline.data import decode
from paceline.data.encoded_images import EncodedImages
from paceline.data.shards import open_records, write_records

MIN_GAIN = 0.05  # share of a step's time below which a change is not advised


@dataclass(frozen=True)
class Costs:
    """Seconds per image in one thread: reading it from its file, reading it from a shard, decoding it."""

    read_s: float
    packed_read_s: float
    decode_s: float


def measure(source: EncodedImages, scratch: Path, num_images: int = 64) -> Costs:
    """Reads and decodes evenly spaced images, and reads them from a temporary shard in ``scratch``.

    The files are first dropped from the page cache, as far as the system permits, so that the disk is measured.
    """
    indices = np.linspace(0, len(source) - 1, min(num_images, len(source))).astype(int).tolist()
    for path in {source.path(index) for index in indices}:
        _drop_cache(path)
    read_s, data = _timed(lambda i: source.data(indices[i]), len(indices))
    decode_s, _ = _timed(lambda i: decode.crop(decode.decode(data[i]), None), len(indices))
    if source.packed:
        return Costs(read_s, read_s, decode_s)
    with TemporaryDirectory(dir=scratch) as folder:
        trial = Path(folder) / "trial"
        write_records(trial, data)
        _drop_cache(str(trial))
        reader = open_records(trial)
        # in random order, as training reads
        order = np.random.default_rng(0).permutation(len(indices)).tolist()
        packed_read_s, _ = _timed(lambda i: bytes(reader.read([order[i]])[0]), len(indices))
    return Costs(read_s, packed_read_s, decode_s)


def advise(wait_s: float, step_s: float, rows: int, costs: Costs, decoders: int, cores: int, packed: bool) -> str:
    """One sentence. ``wait_s``, ``step_s``: a step's wait for samples, and its other time; ``rows``: samples per step.

    ``decoders``: threads or processes that fetch on this node, of ``cores``. Fetching overlaps with the computation
    of the previous step. The model ignores that both share the cores, so the gains are upper bounds.
    """
    total_s = wait_s + step_s
    waited = wait_s / total_s if total_s else 0.0
    if waited < MIN_GAIN:
        return f"Data loading is not the bottleneck: it took {waited:.0%} of step time."

    def seconds(read_s: float, count: int) -> float:
        return max(step_s, rows * (read_s + costs.decode_s) / count)

    current_s = seconds(costs.read_s, decoders)
    changes = {}
    if not packed:
        changes["packing"] = current_s / seconds(costs.packed_read_s, decoders)
    if cores > decoders:
        more = f"{cores} decoding processes or threads instead of {decoders}"
        changes[more] = current_s / seconds(costs.read_s, cores)
    if len(changes) == 2:
        best = max(changes.values())
        both = current_s / seconds(costs.packed_read_s, cores)
        if both > best * (1 + MIN_GAIN):
            changes["both"] = both
    useful = {change: gain for change, gain in changes.items() if gain > 1 + MIN_GAIN}
    facts = (
        f"Data loading took {waited:.0%} of step time (per image: reading {1e3 * costs.read_s:.2f} ms, from a shard "
        f"{1e3 * costs.packed_read_s:.2f} ms, decoding {1e3 * costs.decode_s:.2f} ms)"
    )
    if not useful:
        return f"{facts}: neither packing nor more decoding processes would help; packing with a smaller size may."
    gains = ", ".join(f"{change} {gain:.1f}x" for change, gain in sorted(useful.items(), key=lambda item: -item[1]))
    return f"{facts}: predicted speedup of a step, at most: {gains}."


Result = TypeVar("Result")


def _timed(function: Callable[[int], Result], count: int) -> tuple[float, list[Result]]:
    start = time.perf_counter()
    results = [function(i) for i in range(count)]
    return (time.perf_counter() - start) / count, results


def _drop_cache(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
