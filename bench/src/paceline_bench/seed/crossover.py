"""How large the data must be before a second machine pays: predicted before two machines have trained, then measured.

A run of D images takes ``start + D * image``. A second machine makes an image cheaper and the start dearer: it has to
be met, to agree, and to be given the first weights. They cross where both runs take the same time,

    D = (start2 - start1) / (image1 - image2).

Predicted: an image from a step that is recorded on one node, from the wire as measured without a limited rate, and from
what loading an image costs; a start from runs of a single step, which need no data. Measured: lines through whole runs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.data import images
from paceline.engine.compute.timeline import Timeline
from paceline.messages import DENSE
from paceline_bench.cluster import emulated_scaling, prediction_error
from paceline_bench.result import Show
from paceline_bench.seed.job import Job
from paceline_bench.seed.trial import Outcome, Setup, run

NODES = 2
STARTS = 5
SIZES = 0.3, 0.7, 1.2, 1.8, 2.6  # of the crossover that was predicted


@dataclass(frozen=True)
class Line:
    """*Units*: seconds, and seconds per image."""

    start_s: float
    image_s: float

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Line:
        """By least squares. Raises ValueError for points of one size alone."""
        slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
        return cls(intercept, slope)


def crossing(one: Line, two: Line) -> float:
    """Images; infinite where a second machine never pays."""
    gain = one.image_s - two.image_s
    return max(0.0, (two.start_s - one.start_s) / gain) if gain > 0 else float("inf")


def setups(mpi: bool = False) -> dict[int, Setup]:
    return {count: Setup(f"paceline, {count} node(s)", "paceline", nodes=count, mpi=mpi) for count in (1, NODES)}


def predicted(job: Job, rate: str, show: Show) -> dict[int, Line]:
    """By the number of nodes."""
    loading_s = _loading_s(job)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        show(f"{job.model}: recording a step on one node")
        emulated_scaling.keep(job.model, job.batch, Path(folder) / "line.json")
        line = Timeline.read(Path(folder) / "line.json")
    cell = prediction_error.Cell(job.model, job.batch // NODES, NODES, (rate,))
    step_s = {1: line.total([DENSE] * len(line.buckets)), NODES: prediction_error.predictions(cell, show)[rate]}
    lines = {}
    for count, setup in setups().items():
        image_s = step_s[count] / job.batch + loading_s / count
        single = replace(job, limit=job.batch)
        whole_s = statistics.median(run(setup, single, rate, show).whole_s for _ in range(STARTS))
        lines[count] = Line(whole_s - job.batch * image_s, image_s)
    return lines


def _loading_s(job: Job) -> float:
    """Seconds of a core to read, decode and scale an image."""
    train, _ = images.load(job.folder, threads=1)
    each = []
    for first in range(STARTS):
        begin = time.perf_counter()
        train.fetch(range(first * job.batch, (first + 1) * job.batch), 0)
        each.append((time.perf_counter() - begin) / job.batch)
    return statistics.median(each)


def measured(
    job: Job, sizes: Sequence[int], rounds: int, run_one: Callable[[Setup, Job], Outcome]
) -> dict[int, list[tuple[int, float]]]:
    """Whole runs of so many images, on one node and on two by turns: (images, seconds)."""
    points: dict[int, list[tuple[int, float]]] = {1: [], NODES: []}
    for _ in range(rounds):
        for size in sizes:
            for count, setup in setups().items():
                points[count].append((size, run_one(setup, replace(job, limit=size)).whole_s))
    return points


def sizes_around(images_: float, batch: int, most: int) -> list[int]:
    """Whole batches, at least three different sizes."""
    wanted = {min(most, max(1, round(part * images_ / batch)) * batch) for part in SIZES}
    wanted |= {batch, min(most, 4 * batch), min(most, 8 * batch)} if len(wanted) < 3 else set()
    return sorted(wanted)
