"""What the plan says of several nodes that it never ran, against what they then take.

    python -m paceline_bench.cluster.prediction_error FOLDER

is one node before any step together: it records a step of its own while the others record theirs, since nodes share
this machine's memory, and measures the wire without a limited rate. Every rate is predicted from that alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

import paceline
from paceline.engine.compute.timeline import record
from paceline.engine.sequential import Engine
from paceline.planner.cluster_model import NetworkModel, predict
from paceline.planner.measure.network import NetworkMeasurement, measure
from paceline.planner.step_model import StepModel
from paceline_bench.cluster.driver import Desk, drive
from paceline_bench.cluster.namespaces import bits_per_s
from paceline_bench.cluster.race import SETUP_S, Entry, Pace, Phase, Race, run, where
from paceline_bench.cluster.work import Work
from paceline_bench.result import Finding, Show


class Cell(NamedTuple):
    """``rows`` per node; ``delay_ms``: of the links, one way."""

    model: str
    rows: int
    nodes: int
    rates: tuple[str, ...]
    delay_ms: float = 0.0


# of the table, the first with three rates of our own choosing after its own
CELLS = (
    Cell("alexnet", 32, 2, ("10gbit", "1gbit", "100mbit", "2gbit", "300mbit", "50mbit")),
    Cell("vgg16", 8, 2, ("1gbit", "100mbit")),
    Cell("resnet50v2@128", 8, 2, ("1gbit", "100mbit")),
    Cell("transformer", 8, 2, ("10gbit", "1gbit", "100mbit")),
    Cell("alexnet", 16, 4, ("1gbit",)),
    Cell("alexnet", 16, 8, ("1gbit",)),
)
LATE = tuple(Cell("alexnet", 32, 2, ("200mbit", "100mbit"), delay_ms) for delay_ms in (1.0, 5.0, 20.0))
TURNS, PASSES = 8, 3
MEDIAN, P90 = 0.10, 0.20


def against_measured(pace: Pace, show: Show, cells: Sequence[Cell] = CELLS, task: str = "predict") -> Iterator[Finding]:
    """Steps of rows that never ran, predicted, then measured, at up to six rates: 12 minutes."""
    lines = ["| work | predicted s | measured s | error |", "|---|---|---|---|"]
    errors = []
    for cell in cells:
        expected = predictions(cell, show)
        phases = tuple(Phase(rate, TURNS) for rate in cell.rates)
        entries = (Entry("paceline"),)
        race = Race(cell.model, cell.rows, cell.nodes, entries, phases, 180.0, delay_ms=cell.delay_ms)
        got = run(race, pace, show)
        for number, rate in enumerate(cell.rates):
            step_s = got.laps[number]["paceline"].step_s
            errors.append(expected[rate] / step_s - 1)
            lines.append(f"| {where(got, number)} | {expected[rate]:.3f} | {step_s:.3f} | {errors[-1]:+.1%} |")
    size = sorted(map(abs, errors))
    middle, most = statistics.median(size), size[min(len(size) - 1, int(0.9 * len(size)))]
    yield Finding(task, f"{len(errors)} rows, predicted and measured", "see below", "-", True, "\n".join(lines))
    what = f"predicted against measured, {len(errors)} rows"
    yield Finding(task, f"{what}: median error", f"{middle:.1%}", f"<= {MEDIAN:.0%}", middle <= MEDIAN)
    yield Finding(task, f"{what}: 90th percentile", f"{most:.1%}", f"<= {P90:.0%}", most <= P90)


def late(pace: Pace, show: Show) -> Iterator[Finding]:
    """AlexNet over links of 1, 5 and 20 ms one way, predicted, then measured, at two rates: 8 minutes."""
    yield from against_measured(pace, show, LATE, "latency")


def predictions(cell: Cell, show: Show) -> dict[str, float]:
    """Seconds per step at each rate."""
    lines, among = measured(cell, show)
    return {rate: predict(lines, among.with_link(bits_per_s(rate))).step_s for rate in cell.rates}


def measured(cell: Cell, show: Show) -> tuple[list[StepModel], NetworkModel]:
    """A step of each node, and the wire between them where its rate is not limited."""
    show(f"{cell.model} b{cell.rows} on {cell.nodes} nodes: recording a step of each, and the wire")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        (Path(folder) / "job.json").write_text(json.dumps([cell.model, cell.rows]))
        said = drive(cell.nodes, ["-m", __name__], Path(folder), SETUP_S, show, cell.delay_ms)
    lines = [StepModel.of(one["timeline"], absorbs=True) for one in said]
    return lines, NetworkMeasurement.of(said[0]["wires"]).model_for(range(cell.nodes))


def main(folder: str) -> None:
    model_name, batch = json.loads((Path(folder) / "job.json").read_text())
    torch.set_num_threads(1)
    nothing = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(nothing.parameters(), lr=0.1)
    pace = paceline.join(nothing, sgd, F.mse_loss, batch_size=2, engine="sequential", shares="equal")
    assert pace.link
    rank, size = pace.link.rank, pace.link.size
    wires = measure(pace.link)
    work, engine = Work(model_name, batch, rank, size), Engine()
    model = work.model()
    engine.open(model, work.sgd(model), F.cross_entropy)
    pace.link.sum(torch.zeros(1)).wait()
    line = record(engine, model, (work.x, work.y), passes=PASSES)
    pace.link.sum(torch.zeros(1)).wait()
    path = Path(folder) / f"line-{rank}.json"
    line.write(path)
    engine.close()
    pace.close()
    Desk(Path(folder), rank).tell({"timeline": json.loads(path.read_text()), "wires": wires.to_dict()})


if __name__ == "__main__":
    main(*sys.argv[1:])
