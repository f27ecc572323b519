"""Experiment trackers: forwards the event log to TensorBoard, MLflow or Weights & Biases, during a run or afterwards.

Training only writes its event log; this module follows the file, in the same process or in another one.
Each number of an event becomes a scalar named ``event/field``, such as ``step/loss`` or ``usage/cpu_percent``.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.report.record import NAME, events, parse

PROJECT = "paceline"
BATCH = 1000  # metrics that MLflow accepts in one call
EVENTS = ("step", "epoch", "usage", "checkpoint")


class Tracker(Protocol):
    """The interface of a tracker. ``rewind`` is called when a resumed run repeats a step."""

    def describe(self, facts: Mapping[str, Any]) -> None: ...
    def scalars(self, values: Mapping[str, float], step: int, time_s: float) -> None: ...
    def rewind(self, step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def follow(run: Path, tracker: str, live: bool = False, poll_s: float = 1.0, timeout_s: float | None = None) -> int:
    """Forwards a run's event log. Returns how many scalars were sent.

    ``live`` follows the log until its last event is `end`, or until no event was added for ``timeout_s`` seconds.
    Destinations: TensorBoard to the run's folder "tensorboard"; MLflow to MLFLOW_TRACKING_URI; W&B as WANDB_MODE says;
    the project "paceline", unless MLFLOW_EXPERIMENT_NAME or WANDB_PROJECT name another.

    *Raises* ValueError for an unknown tracker, one whose package is missing, and as `record.events` does.
    """
    if tracker not in TRACKERS:
        near = difflib.get_close_matches(tracker.lower(), [*TRACKERS, *ALIASES], n=1)
        hint = f"; did you mean {ALIASES.get(near[0], near[0])!r}?" if near else ""
        raise ValueError(f"no tracker named {tracker!r}; known: {', '.join(TRACKERS)}{hint}")
    source = _tail(run, poll_s, timeout_s) if live else iter(events(run))
    first = next(source, None)  # a folder without a record is reported before a tracker is opened
    sink, last, num_scalars = TRACKERS[tracker](run), -1, 0
    try:
        for event in itertools.chain([first], source):
            if event is None:
                sink.flush()
            else:
                last, count = _send(sink, event, last)
                num_scalars += count
    finally:
        sink.close()
    return num_scalars


def _send(sink: Tracker, event: Mapping[str, Any], last: int) -> tuple[int, int]:
    """Returns the last step, and how many scalars were sent."""
    kind = event["event"]
    if kind in ("join", "plan"):
        sink.describe({f"{kind}/{key}": value for key, value in event.items() if key not in ("event", "time")})
    if kind == "log" and isinstance(event.get("value"), int | float):
        sink.scalars(
            {str(event.get("name")): float(event["value"])}, max(0, int(event.get("step", last))), event["time"]
        )
        return last, 1
    if kind not in EVENTS:
        return last, 0
    if kind == "step" and isinstance(event.get("step"), int):
        if event["step"] <= last:
            sink.rewind(event["step"])
        last = event["step"]
    values = {f"{kind}/{name}": value for name, value in _numbers(event).items()}
    if values:
        sink.scalars(values, max(0, last), event["time"])
    return last, len(values)


def _numbers(event: Mapping[str, Any]) -> dict[str, float]:
    found = {n: float(v) for n, v in event.items() if type(v) in (int, float) and n not in ("step", "time")}
    for gpu in event.get("gpus") or ():
        found |= {f"gpu{gpu.get('gpu', 0)}_{name}": float(value) for name, value in gpu.items() if name != "gpu"}
    samples = found.get("rows") or found.get("samples") or found.get("weight")
    if samples and found.get("seconds"):
        found["samples_per_s"] = samples / found["seconds"]
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _tail(run: Path, poll_s: float, timeout_s: float | None) -> Iterator[dict[str, Any] | None]:
    """The events of complete lines as they are written; None when there is no new one."""
    path, number, received_s, ended = run / NAME, 0, time.monotonic(), False
    if not path.is_file():
        next(events(run))  # raises an error that says what is missing
    with path.open("rb") as file:
        while True:
            start = file.tell()
            line = file.readline()
            if line.endswith(b"\n"):
                number, received_s = number + 1, time.monotonic()
                event = parse(line, f"{path}, line {number}")
                yield event
                ended = event["event"] == "end"
                continue
            if ended:  # and no process has resumed the run
                return
            file.seek(start)
            yield None
            if timeout_s is not None and time.monotonic() - received_s > timeout_s:
                return
            time.sleep(poll_s)


class TensorBoard:
    """Event files in the run's folder "tensorboard"; `tensorboard --logdir RUN` shows them."""

    def __init__(self, run: Path):
        self._package = _package("tensorboard", "TensorBoard", "torch.utils.tensorboard")
        self._folder = str(run / "tensorboard")
        self._writer = self._package.SummaryWriter(self._folder)

    def describe(self, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            self._writer.add_text(name, f"    {value}")

    def scalars(self, values: Mapping[str, float], step: int, time_s: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time_s)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._package.SummaryWriter(self._folder, purge_step=step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """Metrics and parameters of one MLflow run, named as the run's folder."""

    def __init__(self, run: Path):
        package = _package("mlflow-skinny", "MLflow", "mlflow")
        self._error_type = package.exceptions.MlflowException
        self._entities = importlib.import_module("mlflow.entities")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        try:
            self._client = package.MlflowClient()
            existing = self._client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing else self._client.create_experiment(name)
            self._id = self._client.create_run(experiment, run_name=run.resolve().name).info.run_id
        except package.exceptions.MlflowException as error:
            raise ValueError(f"MLflow does not take the run: {error}; set MLFLOW_TRACKING_URI to its server") from error
        self._queue: list[Any] = []
        self._failed = False

    def describe(self, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            # a parameter may be set only once, but a resumed run joins again; a tag may be overwritten
            self._call(self._client.set_tag, self._id, name, str(value)[:5000])

    def scalars(self, values: Mapping[str, float], step: int, time_s: float) -> None:
        self._queue += [self._entities.Metric(name, v, int(1000 * time_s), step) for name, v in values.items()]
        if len(self._queue) >= BATCH:
            self.flush()

    def rewind(self, step: int) -> None:
        """MLflow keeps both values of a step, each with its time."""

    def flush(self) -> None:
        while self._queue:
            self._call(self._client.log_batch, self._id, self._queue[:BATCH])
            del self._queue[:BATCH]

    def close(self) -> None:
        if not self._failed:
            self.flush()
            self._call(self._client.set_terminated, self._id)

    def _call(self, function: Callable[..., object], *args: Any) -> None:
        try:
            function(*args)
        except self._error_type as error:
            self._failed = True
            raise ValueError(
                f"MLflow no longer accepts data: {error}; the data sent so far stay there, and the event log has all: "
                f"run `paceline track` again when the server responds"
            ) from error


class WandB:
    """A Weights & Biases run, named as the run's folder; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, run: Path):
        package = _package("wandb", "Weights & Biases", "wandb")
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        settings = package.Settings(console="off", x_disable_stats=True, silent=True)
        try:
            self._run = package.init(project=project, name=run.resolve().name, dir=str(run), settings=settings)
        except package.Error as error:
            raise ValueError(f"W&B does not take the run: {error}; `wandb login`, or set WANDB_MODE=offline") from error
        # W&B's own step may only increase; ours decreases when a run is resumed
        self._run.define_metric("*", step_metric="at_step")

    def describe(self, facts: Mapping[str, Any]) -> None:
        self._run.config.update(dict(facts), allow_val_change=True)

    def scalars(self, values: Mapping[str, float], step: int, time_s: float) -> None:
        self._run.log({**values, "at_step": step, "at_time": time_s})

    def rewind(self, step: int) -> None:
        """W&B shows both values of a step, in the order of their time."""

    def flush(self) -> None:
        """W&B sends by itself."""

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
ALIASES = {"w&b": "wandb", "weights & biases": "wandb", "tb": "tensorboard"}


def _package(package: str, name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{name} needs the package {package}, which is not installed here ({error}); pip install 'paceline[track]'"
        ) from error
