"""A run's event log as columns: each step once, with its last values where the run was resumed and repeated steps."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.report.record import events

OWN = "own/"  # before the names of values that the script logs


class Columns:
    """Each numeric field of some events as a column of float64 values, NaN where an event or all lack the field."""

    def __init__(self) -> None:
        self._columns = {"time_s": array("d")}

    def __len__(self) -> int:
        return len(self._columns["time_s"])

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return np.array(self._columns[name]) if name in self._columns else np.full(len(self), np.nan)

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self[name]).any())

    def add(self, time_s: float, row: Mapping[str, Any]) -> None:
        values = {name: value for name, value in row.items() if isinstance(value, int | float)} | {"time_s": time_s}
        for name in values.keys() - self._columns.keys():
            self._columns[name] = array("d", [float("nan")] * len(self))
        for name, column in self._columns.items():
            column.append(values.get(name, float("nan")))

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def cut(self, name: str, value: float) -> None:
        """Drops the rows at or after ``value`` in an increasing column."""
        length = bisect.bisect_left(self[name], value)
        for column in self._columns.values():
            del column[length:]


@dataclass
class Run:
    """*Units*: seconds of training since the first `join`; the pauses before resuming are left out."""

    name: str
    join: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    steps: Columns = field(default_factory=Columns)
    epochs: Columns = field(default_factory=Columns)
    usage: Columns = field(default_factory=Columns)
    logged: Columns = field(default_factory=Columns)  # by `pace.log`; their names are those of charts
    hints: list[str] = field(default_factory=list)
    drifts: list[dict[str, Any]] = field(default_factory=list)  # the events of re-broadcasts
    resumed: list[tuple[float, float]] = field(default_factory=list)  # (step, time_s) of each join after the first
    end: str = ""
    time_s: float = 0.0
    num_redone: int = 0  # steps that were repeated, because a process failed after them
    num_checkpoints: int = 0

    def column(self, rows: str, name: str) -> NDArray[np.float64]:
        """``rows``: "steps", "epochs", "logged" or "usage". ``name``: a field, or one that is computed from others:
        ``samples_per_s`` and ``exposed_seconds`` of steps, ``memory_bytes`` of usage."""
        columns: Columns = getattr(self, rows)
        if name == "samples_per_s":
            samples = columns["weight"]  # the loss's divisor, which may count tokens instead
            for counted in (columns["samples"], columns["rows"]):  # with local SGD only "rows" counts all nodes
                samples = np.where(np.isfinite(counted), counted, samples)
            with np.errstate(divide="ignore", invalid="ignore"):
                return samples / columns["seconds"]
        if name == "exposed_seconds":  # one node waits for no other
            several = self.join.get("num_nodes", 1) > 1
            return columns["exchange_seconds"] if several else np.full(len(columns), np.nan)
        if name == "memory_bytes":
            return _forward_fill(columns["pss_bytes"]) if columns.has("pss_bytes") else columns["rss_bytes"]
        return columns[name]


def load(folder: Path, name: str = "") -> Run:
    """Reads a run once, line by line. Raises ValueError as `record.events` does."""
    run = Run(name or folder.resolve().name)
    clock, last_step = _Clock(), -1.0
    for event in events(folder):
        kind = event["event"]
        time_s = clock.read(kind, event["time"])
        if kind == "step":
            step = event.get("step")
            if not isinstance(step, int):
                continue
            if step <= last_step:
                run.num_redone += len(run.steps)
                run.steps.cut("step", step)
                run.epochs.cut("step", step)
                run.logged.cut("step", step)
                run.num_redone -= len(run.steps)
            last_step = step
            run.steps.add(time_s, event)
        elif kind == "epoch":
            run.epochs.add(time_s, {**event, "step": last_step, **_means(event)})
        elif kind == "log":
            run.logged.add(time_s, {"step": event.get("step"), f"{OWN}{event.get('name')}": event.get("value")})
        elif kind == "usage":
            run.usage.add(time_s, {**event, **_cores(event), **_gpu_sums(event.get("gpus") or [])})
        elif kind == "join":
            if run.join:
                run.resumed.append((last_step, time_s))
            run.join, run.end = event, ""
        elif kind == "plan":
            run.plan = event
        elif kind == "end":
            run.end = str(event.get("reason", "finished"))
        elif kind == "hint" and str(event.get("text")) not in run.hints:
            run.hints.append(str(event.get("text")))
        elif kind == "drift":
            run.drifts.append(event)
        elif kind == "checkpoint":
            run.num_checkpoints += 1
    run.time_s = clock.now
    return run


class _Clock:
    """Wall time without the pauses between the last event of a session and the next `join`."""

    def __init__(self) -> None:
        self.start: float | None = None
        self.now = 0.0

    def read(self, kind: str, time: float) -> float:
        if kind in ("plan", "hint"):
            return self.now
        if self.start is None:
            self.start = time
        if kind == "join":
            self.start = time - self.now
        self.now = max(self.now, time - self.start)  # the system's clock may be set back
        return self.now


def _means(event: Mapping[str, Any]) -> dict[str, float]:
    """An epoch's mean loss and accuracy, where the event has sums."""
    rows = event.get("rows") or 0
    sums = {"loss": event.get("loss_sum"), "accuracy": event.get("right")}
    return {name: total / rows for name, total in sums.items() if rows and total is not None and name not in event}


def _cores(event: Mapping[str, Any]) -> dict[str, float]:
    """The number of busy cores, from percentages of one core (the run) and of all cores (the machine)."""
    run, machine = event.get("cpu_percent"), event.get("machine_cpu_percent")
    num_cores = len(event.get("core_percents") or ())
    found = {"run_cores": run / 100} if run is not None else {}
    return found | ({"machine_cores": machine / 100 * num_cores} if machine is not None and num_cores else {})


def _gpu_sums(gpus: list[Mapping[str, Any]]) -> dict[str, float]:
    """The mean utilisation and the memory of all GPUs of a node."""
    percents = [gpu["percent"] for gpu in gpus if "percent" in gpu]
    sums = {"gpu_percent": sum(percents) / len(percents)} if percents else {}
    return sums | ({"gpu_memory_bytes": sum(gpu.get("memory_used_bytes", 0) for gpu in gpus)} if gpus else {})


def _forward_fill(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each gap filled with the value before it."""
    return values[np.maximum.accumulate(np.where(np.isfinite(values), np.arange(len(values)), 0))]
