"""The user's handle: a model that one or many processes train."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline import contract, messages, transport
from paceline.checkpoint import auto_resume, run_state
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
from paceline.exchange.flow import gather
from paceline.exchange.flow.control import alone
from paceline.job import Job
from paceline.launch.signals import Stopped
from paceline.planner.measure.stopwatch import times
from paceline.report import process_status
from paceline.report.log import log
from paceline.report.record import Record
from paceline.step import buffer_broadcast
from paceline.step.average import average
from paceline.step.like_torch import LossValue, as_loss, logged, missing
from paceline.step.manual_loop import ManualLoop
from paceline.step.step import ComputeGradient
from paceline.training import Training

MAX_ATTEMPTS = 16  # of one evaluation, each ended by a change of members


class Pace:
    """A model that one or many processes train. Made by `join`.

    ``epoch`` and ``next_step``: the position of the next batch. ``facts``: JSON metadata, saved with every checkpoint.
    ``leader``: true in exactly one process.
    """

    def __init__(self, training: Training):
        self.training, self.run = training, training.run
        self._manual = ManualLoop(self.run, self._manual_step, self._refuse_wrapped)
        self._dataset: Any = None  # the last dataset of `batches`
        self._first_call = 0  # the call of `batches` in which the checkpoint was made

    if not TYPE_CHECKING:  # where a name that is not there is an error already

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(missing(name, dir(type(self))))

    # attributes for scripts

    @property
    def link(self) -> transport.Link | None:
        """The link to other nodes, which local rank 0 holds."""
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
        """The outcome of the last step."""
        return self.training.outcome

    @property
    def epoch(self) -> int:
        return self.run.cursor.epoch

    @property
    def next_step(self) -> int:
        return self.run.cursor.next_step

    @property
    def row(self) -> str:
        """The configuration of this training, as in a plan."""
        return self.run.row

    @property
    def facts(self) -> dict[str, Any]:
        return self.run.facts

    @facts.setter
    def facts(self, facts: dict[str, Any]) -> None:
        self.run.facts = facts

    # the data

    def batches(self, dataset: Any, epochs: int = 1, shuffle: bool = True, workers: int = 0) -> Iterator[Batch]:
        """Every global batch, in the same sequence on any number of nodes; `step` takes this node's share.

        ``dataset``: a map-style Dataset, a DataLoader, or an iterable dataset. The epoch count continues from call to
        call. After `restore`, the first call resumes at the checkpoint, and ends as the interrupted call would have.
        """
        run, cursor = self.run, self.run.cursor
        cursor.epochs, cursor.calls = epochs, cursor.calls + 1
        auto_resume.begin()
        if cursor.calls < self._first_call:
            return  # this call had ended before the checkpoint
        auto_resume.restore_random(run)
        if not cursor.resumed:
            cursor.epoch, cursor.next_step = cursor.epoch + (cursor.next_step > 0), 0
            cursor.began = cursor.epoch
        if cursor.resumed and cursor.epoch >= cursor.began + epochs and run.leader:
            log.info("this call of batches yields nothing: the checkpoint was made after its last batch")
        cursor.resumed = False
        first = not cursor.facts
        if first or (self.training.admission and dataset is not self._dataset):  # compared with a joining node's
            cursor.facts, self._dataset = data_facts(dataset), dataset
        if self.training.joiner:
            if not self.training.joiner.enter(epochs):
                return
            self.training.joiner = None  # the members have compared their datasets already
            process_status.report(joined=True)
        elif first:
            with self.training.collective("comparing datasets"):
                compare_data(run.control, cursor.facts)
        last = sys.maxsize if self.training.stopwatch else cursor.began + epochs  # a trial ends after enough steps
        source = dataset, run.job.batch_size, last, run.job.seed, lambda: run.assignment, shuffle
        cursor.between = False
        try:
            position = cursor.epoch, cursor.next_step
            for batch in global_batches(*source, start=position, workers=workers, times=times(), again=cursor.again):
                batch.unpack = self.rows
                yield batch
                if self.training.stopwatch:
                    self.training.stopwatch.resume()  # exclude what the loop does after its step, such as evaluation
        finally:
            cursor.between = True

    def rows(self, batch: Any) -> Any:
        """This process's samples of a batch, on the model's device, for your own loop; None if it has none."""
        return self._manual.rows(batch)

    @property
    def num_steps(self) -> int:
        """Steps so far, including those before a checkpoint: equal in every process, also of a joining node."""
        return self.run.num_steps

    @property
    def shares(self) -> tuple[int, ...]:
        """Each node's present number of samples of a whole global batch."""
        return self.run.shares

    @property
    def terms(self) -> dict[str, float]:
        """The global mean of each component of the last step's loss, where the loss is a dict."""
        return self.training.read().terms

    @property
    def metric(self) -> float | Tensor | dict[str, float | Tensor] | None:
        """The metric of `join` over the last step's global batch, from that step's forward pass, as of `evaluate`; of
        nodes that average later, this node's. None without a metric, and in your own loop (`backward`)."""
        found: dict[str, float | Tensor] = {**self.training.read().metrics, **self.training.tensors.sums}
        return found[""] if found.keys() == {""} else found or None

    # the step

    def step(self, batch: Any) -> LossValue:
        """Forward, backward, all-reduce, optimizer step. Returns the mean loss over the global batch, a float.

        ``batch`` comes from `batches`, or contains this process's own samples, in the form of the dataset. Alone on a
        GPU the loss is waited for where it is used, and an error of this step may be raised by the next.
        Raises LinkError, NotFinite (a FloatingPointError), NoGradient (a RuntimeError), UnlikeOptions (a ValueError),
        CheckpointError once, after the step, where ``save(wait=False)`` could not write, and `Stopped` (a SystemExit)
        after a signal, once a checkpoint is saved.
        """
        batch = batch if isinstance(batch, GlobalBatch) else UserBatch(batch, float(self.run.job.batch_size))
        auto_resume.on_step_without_data(self)
        return as_loss(self.training.step(batch))

    def _manual_step(self, batch: GlobalBatch, gradient: ComputeGradient) -> float:
        auto_resume.on_step_without_data(self)
        loss = float(self.training.step(batch, gradient))
        self.settle()  # the user's own loop may read weights at any point
        return loss

    def _refuse_wrapped(self) -> None:
        if self.training.wrappers:
            self.training.wrappers.refuse_own_loop()

    def backward(self, loss: Any, rows: int | None = None) -> None:
        """For your own loop: adds the gradient of ``loss``, a mean over this process's samples or (sum, weight).

        May be called several times before `update` (several losses over the same samples). ``rows``: the number of
        samples in the mean, where they did not come from `rows`. Communication begins in `update`, without overlap.
        """
        self._manual.backward(loss, rows)

    def clip(self, norm: float) -> None:
        """Clips the next `update` by the norm of the global gradient."""
        self._manual.clip(norm)

    def update(self) -> LossValue:
        """After `backward`: all-reduces the gradients and applies them. Returns the global mean loss."""
        return LossValue(self._manual.update())

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the last step's gradient, before clipping; None with overlap="forward"."""
        return self.training.read().engine.norm

    def settle(self) -> None:
        """With overlap="forward": waits for the last step's update. Call it before you read weights between steps.

        `save`, `evaluate`, `export`, `close`, ``state_dict`` and calls of the model do so by themselves.
        """
        self.run.settle()

    # numbers and tensors of one's own

    def log(self, name: str, value: float) -> None:
        """Adds a number at the last step to the record; reports and trackers show it. Of several processes, the
        leader's counts."""
        self.run.record.write("log", step=max(0, self.run.num_steps - 1), name=str(name), value=logged(name, value))

    def gather(self, tensor: Tensor | float | Sequence[float]) -> Tensor:
        """The tensors of all processes, one after the other along the first dimension, in every process. Collective."""
        with self.training.collective("gathering a tensor"):
            return gather.gather(self.control, tensor)

    def all_reduce(self, tensor: Tensor | float | Sequence[float], operation: str = "sum") -> Tensor:
        """The ``sum``, ``max`` or ``min`` over all processes, added in one order, in every process. Collective."""
        with self.training.collective("reducing a tensor"):
            return gather.all_reduce(self.control, tensor, operation)

    # operations of one process per node, and collective evaluation

    def once(self, work: Callable[..., Any] | None = None, *args: Any) -> Any:
        """Without arguments: true in exactly one process of each node.

        With a function: that process calls it while the others wait. Returns its result there, None elsewhere.
        """
        first = self.world.local_rank == 0
        if work is None:
            return first
        with self.training.collective("waiting for one process's work in Pace.once"):
            return alone(self.control, lambda: first, lambda: work(*args))

    def evaluate(self, dataset: Any, metric: Callable[..., Any] | None = None, rows: int | None = None) -> Any:
        """Mean of ``metric`` (the job's by default) over a dataset: every sample once, divided among all processes.

        ``metric(output, target)`` is a sum over samples, a (sum, weight), or a dict of these; ``(tensor, None)``, such
        as a confusion matrix, is added up and not divided. ``rows``: samples per forward pass, by default as many as in
        a step, which fit into memory. Collective: every process must call it, as `step` and `save`.
        """
        metric = metric or self.job.metric
        if metric is None:
            raise ValueError("evaluate() needs a metric: a function (output, target) -> sum over rows")
        self.settle()
        rows = rows or max(1, self.job.batch_size // self.world.world_size)
        if self.job.most_rows:
            rows = max(1, min(rows, self.job.most_rows // self.world.local_size))
        with self.training.collective("evaluating"):
            average(self.run)
            for _ in range(MAX_ATTEMPTS):
                buffer_broadcast.broadcast_buffers(self.job.model, self.engine, self.control)
                options = self.run.assignment, dataset, metric, rows, self._cast_batch
                result = evaluate(self.job.model, self.engine, self.control, *options)
                if result is not None:
                    if self.training.equivalence_run:
                        self.training.equivalence_run.evaluate(result, metric)
                    return result
            raise LinkError(f"the members changed during each of {MAX_ATTEMPTS} evaluations; check the network")

    def _cast_batch(self, rows: Any) -> Any:
        return self.training.equivalence_run.cast(rows, batches_.mapped) if self.training.equivalence_run else rows

    # checkpoints and export

    def save(self, folder: str | os.PathLike[str] | None = None, wait: bool = True) -> Path | None:
        """Saves a checkpoint of all state, from which `restore` resumes bit by bit. All processes must call it.

        It is written atomically, to ``folder`` (the run's by default). Returns its path in the leader.

        With ``wait=False`` all state is copied, and written while training continues. The next `save`, `restore` and
        the end wait for it. An error is raised once, in every process, by the next `step` or by one of these.
        Raises CheckpointError (an OSError).
        """
        return self.training.save(self._run_folder(folder, "save"), wait)

    def restore(self, folder: str | os.PathLike[str] | None = None) -> bool:
        """Resumes from the newest complete checkpoint of a run, or from one checkpoint. False if there is none.

        With the same number of processes and the same plan, training continues bit by bit as if uninterrupted. Every
        process must call it; all use the newest checkpoint that each can read. Raises ValueError for a checkpoint of
        another model, with the differences, or if they have none in common; CheckpointError if all are damaged.
        """
        run = self._run_folder(folder, "restore")
        if self.training.joiner:
            return True  # the state comes from the members
        result = self._restore(run) is not None
        auto_resume.on_script_restore(self, result)
        return result

    def resume_unasked(self) -> bool:
        """Like `restore`, for a script that does not call it."""
        run = self._run_folder(None, "restore")
        checkpoint = self._restore(run, lambda state: bool(state.get("join", 0) == self.run.number))
        if checkpoint:
            self._first_call = checkpoint.state.get("call", 0)
            self.run.cursor.resumed = not checkpoint.state.get("between", False)  # else the next call starts anew
        return checkpoint is not None

    def _restore(self, run: Path, fits: Callable[[Any], bool] = bool) -> Checkpoint | None:
        with self.training.collective("restoring"):
            checkpoint = None if self.run.watched else self.training.saver.restore(run, fits)
        if self.training.admission and checkpoint:
            self.training.admission.begin_again()
        for observer in self.run.observers if checkpoint else ():
            observer.averaged()
        self.run.cursor.resumed = self.run.cursor.resumed or checkpoint is not None
        return checkpoint

    def keep(self, **objects: Any) -> None:
        """From now on saved and restored with the run, by these names, and sent to a joining node: anything with
        ``state_dict`` and ``load_state_dict``, such as a scheduler that you step each epoch, or averaged weights.

        Call it before `restore` or `batches`. Of several processes, the leader's state is saved.
        """
        for name, thing in objects.items():
            run_state.keep(self.run, name, thing)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes the model's ``state_dict`` alone, as safetensors, atomically, in one process."""
        if self.run.watched:
            return
        self.settle()
        with self.training.collective("exporting"):
            average(self.run)
            buffer_broadcast.broadcast_buffers(self.job.model, self.engine, self.control)
            alone(self.control, lambda: self.leader, lambda: export(Path(path), self.engine.state(), self.facts))

    def _run_folder(self, folder: str | os.PathLike[str] | None, method: str) -> Path:
        if folder is None and self.folder is None:
            raise ValueError(f"{method}() needs a folder: {method}('runs/mine'), or join(folder='runs/mine')")
        return Path(folder) if folder is not None else self.folder or Path()

    # the end

    def close(self, reason: str = "finished") -> None:
        """Ends normally, together with all processes. Called at the end of a ``with`` block; ``reason`` is logged."""
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
                self.engine.close()  # closed sockets notify the other processes
            # a second Ctrl-C must end the process at once
            unwritten = self.training.leave(f"{kind.__name__}: {error}", wait=not isinstance(error, KeyboardInterrupt))
            if unwritten:
                log.error(str(unwritten))
