"""The user's handle: a model that one or many processes train."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline import contract, messages, transport
from paceline.checkpoint import auto_resume
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.export import export
from paceline.contract import GlobalBatch
from paceline.data.batches import Batch, UserBatch
from paceline.data.batches import batches as global_batches
from paceline.elastic.consistency import compare_data, data_facts
from paceline.engine.compute import batch as batches_
from paceline.engine.compute.evaluate import evaluate
from paceline.environment import LaunchEnvironment
from paceline.errors import LinkError
from paceline.exchange.flow.control import alone
from paceline.job import Job
from paceline.launch.signals import Stopped
from paceline.launch.supervise import process_status
from paceline.planner.measure.stopwatch import times
from paceline.report.log import log
from paceline.report.record import Record
from paceline.step import buffer_broadcast
from paceline.step.average import average
from paceline.step.manual_loop import ManualLoop
from paceline.step.step import ComputeGradient
from paceline.training import Training

MAX_LOSSES = 16  # during one evaluation


class Pace:
    """A model being trained by one or many. Made by `join`.

    ``epoch`` and ``next_step``: where the next batch lies. ``facts``: whatever JSON can hold, kept with every
    checkpoint. ``leader``: true in one process of all.
    """

    def __init__(self, training: Training):
        self.training, self.run = training, training.run
        self._manual = ManualLoop(self.run, self._manual_step, self._refuse_wrapped)
        self._dataset: Any = None  # that `batches` was given last
        self._first_call = 0  # that was not over when the checkpoint was made

    # what a script may read

    @property
    def link(self) -> transport.Link | None:
        """To other nodes, of local rank 0."""
        return self.run.link if self.training.linked else None

    @property
    def job(self) -> Job:
        return self.run.job

    @property
    def world(self) -> LaunchEnvironment:
        return self.run.world

    @property
    def engine(self) -> contract.Engine:
        return self.run.engine

    @property
    def exchange(self) -> contract.Exchange:
        return self.run.exchange

    @property
    def control(self) -> transport.Control:
        return self.run.control

    @property
    def record(self) -> Record:
        return self.run.record

    @property
    def folder(self) -> Path | None:
        return self.run.folder

    @property
    def leader(self) -> bool:
        return self.run.leader

    @property
    def agreement(self) -> messages.StepOutcome:
        """Of the last step."""
        return self.run.last

    @property
    def epoch(self) -> int:
        return self.run.cursor.epoch

    @property
    def next_step(self) -> int:
        return self.run.cursor.next_step

    @property
    def row(self) -> str:
        """Of a plan, which this training obeys."""
        return self.run.row

    @property
    def facts(self) -> dict[str, Any]:
        return self.run.facts

    @facts.setter
    def facts(self, facts: dict[str, Any]) -> None:
        self.run.facts = facts

    # the data

    def batches(self, dataset: Any, epochs: int = 1, shuffle: bool = True, workers: int = 0) -> Iterator[Batch]:
        """Every global batch, as the same sequence on any number of nodes; `step` takes this node's share.

        ``dataset``: a map-style Dataset, a DataLoader, or an iterable dataset. Epochs count on from call to call. After
        `restore`, the first call goes on where the checkpoint was made, and ends where it would have ended.
        """
        run, cursor = self.run, self.run.cursor
        cursor.epochs, cursor.calls = epochs, cursor.calls + 1
        auto_resume.begin()
        if cursor.calls < self._first_call:
            return  # had ended before the checkpoint
        auto_resume.restore_random(run)
        if not cursor.resumed:
            cursor.epoch, cursor.next_step = cursor.epoch + (cursor.next_step > 0), 0
            cursor.began = cursor.epoch
        cursor.resumed = False
        first = not cursor.facts
        if first or (self.training.admission and dataset is not self._dataset):  # compared with a joining node's
            cursor.facts, self._dataset = data_facts(dataset), dataset
        if self.training.joiner:
            if not self.training.joiner.enter(epochs):
                return
            self.training.joiner = None  # the others have asked each other already
            process_status.report(joined=True)
        elif first:
            with self.training.among_all("comparing datasets"):
                compare_data(run.control, cursor.facts)
        last = sys.maxsize if self.training.stopwatch else cursor.began + epochs  # a trial ends after enough steps
        source = dataset, run.job.batch_size, last, run.job.seed, lambda: run.assignment, shuffle
        cursor.between = False
        try:
            place = cursor.epoch, cursor.next_step
            for batch in global_batches(*source, start=place, workers=workers, times=times(), again=cursor.again):
                yield batch
                if self.training.stopwatch:
                    self.training.stopwatch.resume()  # what the loop did after its step (evaluation) is not the step's
        finally:
            cursor.between = True

    def rows(self, batch: Any) -> Any:
        """This process's rows of a batch, on the model's device, for a loop of your own; None if it has none."""
        return self._manual.rows(batch)

    @property
    def num_steps(self) -> int:
        """Steps so far, those before a checkpoint included: the same number in every process, also of a late node."""
        return self.run.num_steps

    @property
    def shares(self) -> tuple[int, ...]:
        """Each node's rows of a whole global batch, as they are dealt at present."""
        return self.run.shares

    @property
    def terms(self) -> dict[str, float]:
        """Each named part of the last step's loss, as a global mean, where the loss is a dict."""
        return self.training.steps.terms

    # the step

    def step(self, batch: Any) -> float:
        """Forward, backward, agree, update. Returns the mean loss over the global batch.

        ``batch`` comes from `batches`, or is this process's own rows, shaped as the dataset would give them.
        Raises LinkError, NotFinite (a FloatingPointError), NoGradient (a RuntimeError), UnlikeOptions (a ValueError),
        CheckpointError once, after the step, where ``save(wait=False)`` could not write, and `Stopped` (a SystemExit)
        after a signal, once all is saved.
        """
        if not isinstance(batch, GlobalBatch):
            batch = UserBatch(batch, float(self.run.job.batch_size))
        auto_resume.on_step_without_data(self)
        return self.training.step(batch)

    def _manual_step(self, batch: GlobalBatch, gradient: ComputeGradient) -> float:
        auto_resume.on_step_without_data(self)
        loss = self.training.step(batch, gradient)
        self.settle()  # a loop of your own reads weights where it likes
        return loss

    def _refuse_wrapped(self) -> None:
        if self.training.wrappers:
            self.training.wrappers.refuse_own_loop()

    def backward(self, loss: Any, rows: int | None = None) -> None:
        """For a loop of your own: adds the gradient of ``loss``, a mean over this process's rows or (sum, weight).

        May be called several times before `update` (several losses over the same rows). ``rows``: how many the mean is
        over, where they did not come from `rows`. Nothing leaves before `update`: communication is not overlapped.
        """
        self._manual.backward(loss, rows)

    def clip(self, norm: float) -> None:
        """Clips the next `update` by the global norm of everyone's gradient."""
        self._manual.clip(norm)

    def update(self) -> float:
        """After `backward`: everyone's gradients are added up and applied. Returns the global mean loss."""
        return self._manual.update()

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the last step's gradient, before clipping; None with overlap="forward"."""
        return self.engine.norm

    def settle(self) -> None:
        """With overlap="forward": waits for the last step's update, before you read weights yourself between steps.

        `save`, `evaluate`, `export`, `close`, ``state_dict`` and calls of the model do so by themselves.
        """
        self.run.settle()

    # what must happen once, everywhere, or be counted once

    def once(self, work: Callable[..., Any] | None = None, *args: Any) -> Any:
        """Without arguments: whether this is the one process of its node that should do a thing.

        With a function: that process calls it while the others wait; its result there, None elsewhere.
        """
        chosen = self.world.local_rank == 0
        if work is None:
            return chosen
        with self.training.among_all("waiting for what one process does once"):
            return alone(self.control, lambda: chosen, lambda: work(*args))

    def evaluate(self, dataset: Any, metric: Callable[..., Any] | None = None, rows: int | None = None) -> Any:
        """Mean of ``metric`` (the job's by default) over a dataset, every sample once, shared out among all.

        ``metric(output, target)`` is a sum over rows, a (sum, weight), or a dict of these. ``rows`` go through the
        model at a time: by default as many as in a step, which is known to fit. Every process must call it,
        as every process must call `step` and `save`.
        """
        metric = metric or self.job.metric
        if metric is None:
            raise ValueError("evaluate() needs a metric: a function (output, target) -> sum over rows")
        self.settle()
        rows = rows or max(1, self.job.batch_size // self.world.world_size)
        if self.job.most_rows:
            rows = max(1, min(rows, self.job.most_rows // self.world.local_size))
        with self.training.among_all("evaluating"):
            average(self.run)
            for _ in range(MAX_LOSSES):
                buffer_broadcast.spread(self.job.model, self.engine, self.control)
                how = self.run.assignment, dataset, metric, rows, self._seen
                found = evaluate(self.job.model, self.engine, self.control, *how)
                if found is not None:
                    if self.training.witness:
                        self.training.witness.evaluate(found, metric)
                    return found
            raise LinkError(f"{MAX_LOSSES} times the nodes disagreed on who had begun; look at the network")

    def _seen(self, rows: Any) -> Any:
        return self.training.witness.cast(rows, batches_.mapped) if self.training.witness else rows

    # what is kept

    def save(self, folder: str | os.PathLike[str] | None = None, wait: bool = True) -> Path | None:
        """A checkpoint of everything, from which `restore` goes on bit by bit. All processes must call it.

        Written whole or not at all, to ``folder`` (the run's by default). Returns its path in the leader.

        With ``wait=False`` everything is copied, and written while training goes on. The next `save`, `restore` and
        the end wait for it; what went wrong is raised once, by every process, by the next `step` or by these.
        Raises CheckpointError (an OSError).
        """
        return self.training.save(self._run_folder(folder, "save"), wait)

    def restore(self, folder: str | os.PathLike[str] | None = None) -> bool:
        """Goes on from the newest whole checkpoint of a run, or from one checkpoint. False if there is none.

        On the same number of processes and the same plan, every bit is as if nothing had happened. All must call it,
        and all take the same: the newest that every one of them can read. Raises ValueError for a checkpoint of another
        model, naming what differs, and where they have none in common; CheckpointError where all are damaged.
        """
        run = self._run_folder(folder, "restore")
        if self.training.joiner:
            return True  # the others are further
        found = self._restore(run) is not None
        auto_resume.on_script_restore(self, found)
        return found

    def resume_unasked(self) -> bool:
        """As `restore`, for a script that does not call it."""
        run = self._run_folder(None, "restore")
        kept = self._restore(run, lambda state: bool(state.get("join", 0) == self.run.number))
        if kept:
            self._first_call = kept.state.get("call", 0)
            self.run.cursor.resumed = not kept.state.get("between", False)  # else the next call is one of its own
        return kept is not None

    def _restore(self, run: Path, fits: Callable[[Any], bool] = bool) -> Checkpoint | None:
        with self.training.among_all("restoring"):
            kept = None if self.run.watched else self.training.saver.restore(run, fits)
        if self.training.admission and kept:
            self.training.admission.begin_again()
        for each in self.run.observers if kept else ():
            each.averaged()
        self.run.cursor.resumed = self.run.cursor.resumed or kept is not None
        return kept

    def export(self, path: str | os.PathLike[str]) -> None:
        """The model's ``state_dict`` alone, as safetensors, written by one process, whole or not at all."""
        if self.run.watched:
            return
        self.settle()
        with self.training.among_all("exporting"):
            average(self.run)
            buffer_broadcast.spread(self.job.model, self.engine, self.control)
            alone(self.control, lambda: self.leader, lambda: export(Path(path), self.engine.state(), self.facts))

    def _run_folder(self, folder: str | os.PathLike[str] | None, doing: str) -> Path:
        if folder is None and self.folder is None:
            raise ValueError(f"{doing}() needs a folder: {doing}('runs/mine'), or join(folder='runs/mine')")
        return Path(folder) if folder is not None else self.folder or Path()

    # the end

    def close(self, reason: str = "finished") -> None:
        """Leaves the others in peace. Called at the end of a ``with`` block; ``reason`` is for the record."""
        self.training.close(reason)

    def __enter__(self) -> Pace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not isinstance(error, Stopped):
            with contextlib.suppress(Exception):
                self.engine.close()  # its sockets tell the others
            # a second Ctrl-C wants the end at once
            unwritten = self.training.leave(f"{kind.__name__}: {error}", wait=not isinstance(error, KeyboardInterrupt))
            if unwritten:
                log.error(str(unwritten))
