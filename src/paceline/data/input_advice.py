"""Whether packing, or more processes that decode, would make training faster: from measured seconds."""

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
from paceline.data.encoded_images import Pictures
from paceline.data.shards import open_records, write_records

LITTLE = 0.05  # share of a step's time that is not worth a change


@dataclass(frozen=True)
class Costs:
    """Seconds per image in one thread: reading it as it lies, reading it from a shard, decoding it."""

    read_s: float
    packed_read_s: float
    decode_s: float


def measure(source: Pictures, scratch: Path, num_images: int = 64) -> Costs:
    """Reads and decodes images chosen evenly, and reads them from a shard written to ``scratch`` for that.

    The system is asked to forget the files first, so that disks and not its memory are measured, where it obeys.
    """
    indices = np.linspace(0, len(source) - 1, min(num_images, len(source))).astype(int).tolist()
    for path in {source.path(index) for index in indices}:
        _forget(path)
    read_s, data = _timed(lambda at: source.data(indices[at]), len(indices))
    decode_s, _ = _timed(lambda at: decode.crop(decode.decode(data[at]), None), len(indices))
    if source.packed:
        return Costs(read_s, read_s, decode_s)
    with TemporaryDirectory(dir=scratch) as folder:
        trial = Path(folder) / "trial"
        write_records(trial, data)
        _forget(str(trial))
        reader = open_records(trial)
        # not in the order in which they lie, as training reads
        turns = np.random.default_rng(0).permutation(len(indices)).tolist()
        packed_read_s, _ = _timed(lambda at: bytes(reader.read([turns[at]])[0]), len(indices))
    return Costs(read_s, packed_read_s, decode_s)


def advise(wait_s: float, step_s: float, rows: int, costs: Costs, decoders: int, cores: int, packed: bool) -> str:
    """One sentence. ``wait_s``, ``step_s``: of a step, waiting for rows and all else; ``rows``: fetched per step.

    ``decoders``: threads or processes that fetch on this node, of ``cores``. Fetching takes place while the step
    before computes; that decoding and computing share the cores is left out, so the gains are the most to hope for.
    """
    total_s = wait_s + step_s
    waited = wait_s / total_s if total_s else 0.0
    if waited < LITTLE:
        return f"Input is not what limits: steps waited {waited:.0%} of their time for images."

    def seconds(read_s: float, num: int) -> float:
        return max(step_s, rows * (read_s + costs.decode_s) / num)

    now_s = seconds(costs.read_s, decoders)
    changes = {}
    if not packed:
        changes["packing"] = now_s / seconds(costs.packed_read_s, decoders)
    if cores > decoders:
        changes[f"{cores} decoding processes or threads instead of {decoders}"] = now_s / seconds(costs.read_s, cores)
    if len(changes) == 2:
        best = max(changes.values())
        both = now_s / seconds(costs.packed_read_s, cores)
        if both > best * (1 + LITTLE):
            changes["both"] = both
    useful = {what: gain for what, gain in changes.items() if gain > 1 + LITTLE}
    facts = (
        f"Steps waited {waited:.0%} of their time for images (reading one took {1e3 * costs.read_s:.2f} ms, from a "
        f"shard {1e3 * costs.packed_read_s:.2f} ms, decoding {1e3 * costs.decode_s:.2f} ms)"
    )
    if not useful:
        return f"{facts}: neither packing nor more decoding processes would help; packing with a smaller size may."
    gains = ", ".join(f"{what} {gain:.1f}x" for what, gain in sorted(useful.items(), key=lambda each: -each[1]))
    return f"{facts}: faster steps, at most, by {gains}."


Result = TypeVar("Result")


def _timed(function: Callable[[int], Result], count: int) -> tuple[float, list[Result]]:
    start = time.perf_counter()
    results = [function(at) for at in range(count)]
    return (time.perf_counter() - start) / count, results


def _forget(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
