"""Quantities that the page shows as charts, with their chart and unit. Single values: `summary`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.report.page.charts import Axis, Line, chart
from paceline.report.page.run import OWN, Run

NUM_POINTS = 800  # of one quantity, over all runs: so that the page stays below a megabyte
MAX_POINTS = 300  # of one curve: as many as a phone can show


@dataclass(frozen=True)
class Chart:
    """A chart of one or two quantities; the second is dashed.

    ``of``: the column of each quantity, by name. ``rows``: "steps", "epochs" or "usage". Charts of training are shown
    over steps and over time, those of the machine over time.
    """

    key: str
    title: str
    note: str
    label: str
    unit: str
    rows: str
    of: Mapping[str, str]
    from_zero: bool = True
    if_varied: bool = False


TRAINING = (
    Chart("loss", "Loss", "mean over the global batch", "loss", "", "steps", {"loss": "loss"}, from_zero=False),
    Chart(
        *("accuracy", "Accuracy", "after each epoch; solid: test data, dashed: training data", "{} right", "share"),
        *("epochs", {"test": "test_accuracy", "training": "accuracy"}),
        from_zero=False,
    ),
    Chart(
        *("throughput", "Throughput", "samples of a step over its seconds", "samples/s", "", "steps"),
        {"samples/s": "samples_per_s"},
    ),
    Chart(
        *("exposed", "Exposed communication", "waited for other nodes after backward", "{} per step", "s", "steps"),
        {"exposed": "exposed_seconds"},
    ),
    Chart("rate", "Learning rate", "of the first group", "rate", "", "steps", {"rate": "lr"}, if_varied=True),
    Chart("norm", "Gradient norm", "of all gradients, before clipping", "norm", "", "steps", {"norm": "norm"}),
)
MACHINE = (
    Chart(
        *("cpu", "Processors", "solid: the run; dashed: the whole machine", "cores busy", ""),
        *("usage", {"run": "run_cores", "machine": "machine_cores"}),
    ),
    Chart(
        *("memory", "Memory", "solid: the run, shared pages counted once; dashed: in use on the machine", "{}", "B"),
        *("usage", {"run": "memory_bytes", "machine": "memory_used_bytes"}),
    ),
    Chart("swap", "Swap", "in use on the machine", "{}", "B", "usage", {"swap": "swap_used_bytes"}),
    Chart("bytes", "Bytes sent", "by this node in a step", "{} per step", "B", "steps", {"sent": "sent_bytes"}),
    Chart(
        *("network", "Network", "of the machine; solid: sent, dashed: received", "{}/s", "B", "usage"),
        {"sent": "net_sent_bytes_per_s", "received": "net_received_bytes_per_s"},
    ),
    Chart(
        *("disk", "Disks", "of the machine; solid: read, dashed: written", "{}/s", "B", "usage"),
        {"read": "disk_read_bytes_per_s", "written": "disk_written_bytes_per_s"},
    ),
    Chart(
        *("switches", "Context switches", "of the machine", "per second", "", "usage"),
        {"switches": "context_switches_per_s"},
    ),
    Chart("gpu", "GPUs", "busy, mean over this node's", "%", "", "usage", {"busy": "gpu_percent"}),
    Chart("gpu-memory", "GPU memory", "in use, all of this node's", "{}", "B", "usage", {"in use": "gpu_memory_bytes"}),
)


def own(runs: Sequence[Run]) -> list[Chart]:
    """Charts of what the scripts logged, by name."""
    names = [name for run in runs for name in run.logged.names if name.startswith(OWN)]
    return [
        Chart(f"own-{i}", short, "logged by the script", "value", "", "logged", {short: name}, from_zero=False)
        for i, name in enumerate(dict.fromkeys(names))
        if (short := name.removeprefix(OWN))
    ]


def charts(wanted: Sequence[Chart], runs: Sequence[Run]) -> Iterator[str]:
    """The charts for which a run has values."""
    for spec in wanted:
        shown = [
            (i, run, index, name, run.column(spec.rows, column))
            for i, run in enumerate(runs)
            for index, (name, column) in enumerate(spec.of.items())
        ]
        shown = [row for row in shown if np.isfinite(row[-1]).any()]
        if not shown or (spec.from_zero and not any(np.nanmax(values) > 0 for *_, values in shown)):
            continue
        if spec.if_varied and all(np.nanmax(values) == np.nanmin(values) for *_, values in shown):
            continue
        y_axis = Axis.up(np.concatenate([row[-1] for row in shown]), spec.label, spec.unit, spec.from_zero)
        for along in ("time_s",) if spec.rows == "usage" else ("step", "time_s"):
            lines = [
                Line(
                    *(i, _name(run, name, len(runs), len(spec.of)), run.column(spec.rows, along), values),
                    dashed=index > 0,
                    dots=spec.rows == "epochs",
                )
                for i, run, index, name, values in shown
            ]
            x = np.concatenate([line.x for line in lines])
            x_axis = Axis.along(x, "step") if along == "step" else Axis.along(x, "time ({})", "s")
            marks = [(i, at[along == "time_s"]) for i, run in enumerate(runs) for at in run.resumed]
            kind = "" if spec.rows == "usage" else "by-step" if along == "step" else "by-time"
            yield chart(
                *(f"{spec.key}{'-by-step' * (along == 'step')}", spec.title, spec.note, x_axis, y_axis, lines),
                num_points=min(MAX_POINTS, NUM_POINTS // len(runs)),
                marks=[(i, x) for i, x in marks if x <= x_axis.high * x_axis.per],
                kind=kind,
            )


def _name(run: Run, quantity: str, num_runs: int, num_quantities: int) -> str:
    return " ".join([run.name] * (num_runs > 1) + [quantity] * (num_quantities > 1 or num_runs == 1))
