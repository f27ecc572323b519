"""Scaling curves by emulated compute: a recorded step's waits on each of 1 to 32 nodes, over a real exchange and wire.

    python -m paceline_bench.cluster.emulated_scaling MODEL BATCH FILE

records a timeline on one thread. Against it the same replay with every piece dense, which is what DDP sends. All nodes
share this machine's cores: where their traffic needs more processor than there is, the curve is a lower bound, and the
bytes per second that went through say so.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.nn import functional as F

from paceline.engine.compute.timeline import Timeline, record
from paceline.engine.sequential import Engine
from paceline.messages import DENSE
from paceline.planner.cluster_model import NetworkModel, predict
from paceline.planner.measure import fresh_process
from paceline.planner.step_model import StepModel
from paceline_bench.cluster import prediction_error
from paceline_bench.cluster.namespaces import bits_per_s
from paceline_bench.cluster.race import Entry, Pace, Phase, Race, Result, run
from paceline_bench.cluster.work import Work
from paceline_bench.result import Finding, Show

# model, rows, the most nodes (memory: a node of the largest takes 2 GiB)
MODELS = (("alexnet", 32, 16), ("vgg16", 8, 8), ("resnet50v2", 8, 32), ("gpt2-size@256", 1, 8))
NODES = (2, 4, 8, 16, 32)
RATES = ("1gbit", "10gbit")
TURNS, PASSES = 3, 3
WARM_UP = 8  # steps, in which an exchange has seen what the wire is, and changed its mind
FASTER = 10.0  # than one of this machine's cores, a small accelerator; real steps on cores are raced for real
LIMIT_S = 900.0
RECORD_S = 600.0


def curves(
    pace: Pace,
    show: Show,
    models: tuple[tuple[str, int, int], ...] = MODELS,
    nodes: tuple[int, ...] = NODES,
    rates: tuple[str | None, ...] = RATES,
) -> Iterator[Finding]:
    """Emulated: 4 models on 2 to 32 nodes at 1 and 10 Gbit/s, computing ten times as fast as a core; 60 minutes."""
    _, wire = prediction_error.measured(prediction_error.Cell("tiny", 4, 2, ()), show)
    for model, batch, most in models:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            show(f"recording a step of {model} b{batch}")
            file, dense = Path(folder) / "line.json", Path(folder) / "dense.json"
            keep(model, batch, file)
            line = Timeline.read(file)
            all_dense(line).write(dense)
            curve = [_alone(line)]
            for count in (n for n in nodes if n <= most):
                entries = tuple(
                    Entry(name, row=f"emulated:{kept.name},faster={FASTER:g}")
                    for name, kept in (("paceline", file), ("dense", dense))
                )
                phases = tuple(Phase(rate, TURNS, WARM_UP) for rate in rates)
                race = Race("nothing", line.rows, count, entries, phases, LIMIT_S)
                curve += _points(run(race, pace, show, (file, dense)), line, {"paceline": file, "dense": dense}, wire)
        what = f"EMULATED: {model} b{batch} per node, 1 to {max(n for n in nodes if n <= most)} nodes"
        yield Finding("scaling", what, "see below", "-", True, "\n".join([*HEAD, *curve]))


def of_factors(pace: Pace, show: Show) -> Iterator[Finding]:
    """Of these, AlexNet on 2 to 16 nodes and VGG16 on 2 to 8, which have layers to factor; 35 minutes."""
    yield from curves(pace, show, MODELS[:2])


def of_sums(pace: Pace, show: Show) -> Iterator[Finding]:
    """Of these, ResNet50V2 on 2 to 32 nodes and a GPT-2 in size on 2 to 8, whose gradients are sums; 30 minutes."""
    yield from curves(pace, show, MODELS[2:])


HEAD = (
    f"Emulated compute, {FASTER:g} times as fast as a core; real exchange and wire. `dense` is the same replay with "
    "all gradients dense, as DDP sends them; predicted is for nodes with cores of their own.",
    "",
    "| nodes | link | contender | rows/s | predicted | efficiency | MB per node and step | Gbit/s through all cables |",
    "|---|---|---|---|---|---|---|---|",
)


def _alone(line: Timeline) -> str:
    alone_s = line.total([DENSE] * len(line.buckets)) / FASTER
    return f"| 1 | - | recorded, {FASTER:g} times as fast | {line.rows / alone_s:.2f} | - | 1.00 | 0 | 0 |"


def _points(got: Result, line: Timeline, files: Mapping[str, Path], wire: NetworkModel) -> Iterator[str]:
    race, alone_s = got.race, line.total([DENSE] * len(line.buckets))
    for number, phase in enumerate(race.phases):
        for entry in race.entries:
            lap = got.laps[number][entry.name]
            megabytes = got.megabytes(number, entry.name)
            through = 8e-3 * megabytes * race.nodes / lap.step_s
            replayed = StepModel.of(json.loads(files[entry.name].read_text()), absorbs=True).scaled(1 / FASTER)
            bits = bits_per_s(phase.rate) if phase.rate else None
            expected = predict([replayed] * race.nodes, wire.with_link(bits)).per_s
            yield (
                f"| {race.nodes} | {phase.rate or 'no limit'} | {entry.name} | {got.rate(number, entry.name):.2f} | "
                f"{expected:.2f} | {alone_s / FASTER / lap.step_s:.2f} | {megabytes:.2f} | {through:.2f} |"
            )


def all_dense(line: Timeline) -> Timeline:
    """The same step, of which no layer may travel as factors."""
    return dataclasses.replace(
        line, buckets=tuple(dataclasses.replace(bucket, linear=False) for bucket in line.buckets)
    )


def keep(model: str, batch: int, file: Path) -> None:
    """Records in a process of its own, on one thread. Raises ValueError."""
    command = [sys.executable, "-m", __name__, model, str(batch), str(file)]
    ended = fresh_process.run_in_process(command, {}, RECORD_S)
    if ended.code:
        raise ValueError(f"a step of {model} could not be recorded: {ended.last_line}")
    if ended.code is None:
        raise ValueError(
            f"a step of {model} was not recorded within {RECORD_S:.0f} s; give fewer rows, or another model"
        )


def main(model_name: str, batch: str, file: str) -> None:
    torch.set_num_threads(1)
    work, engine = Work(model_name, int(batch)), Engine()
    model = work.model()
    engine.open(model, work.sgd(model), F.cross_entropy)
    record(engine, model, (work.x, work.y), passes=PASSES).write(file)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
