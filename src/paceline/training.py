"""A training from the end of the rendezvous to its end: steps, checkpoints, signals, and the exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import contract
from paceline.checkpoint.run_folder import RunFolder
from paceline.checkpoint.saver import FAILED, Saver
from paceline.contract import GlobalBatch
from paceline.elastic.admission import Admission
from paceline.elastic.joiner import JoinClient
from paceline.elastic.membership import Members
from paceline.elastic.membership import alone as alone_members
from paceline.elastic.start import start
from paceline.elastic.view_change import ViewChangeHandler
from paceline.engine.checks.own_steps import OwnSteps
from paceline.engine.compute.precision import Scaler
from paceline.engine.compute.unread import ReadsLater
from paceline.engine.node.several_optimizers import separate
from paceline.environment import LaunchEnvironment
from paceline.errors import LinkError, NeverStepped, NoGradient, NotFinite, UnlikeOptions
from paceline.exchange.flow.control import alone
from paceline.exchange.flow.metric_tensors import MetricTensors
from paceline.job import Job
from paceline.launch.signals import HANGUP, RESUME_CODE, SIGNALS, Interrupt, Resume, Stopped
from paceline.launch.supervise.trained_alone import UNSTEPPED, note, unstepped_text
from paceline.messages import SUM, StepOutcome
from paceline.planner import plan_cache
from paceline.planner.diagnose.equivalence import EquivalenceRun
from paceline.planner.measure.stopwatch import Stopwatch
from paceline.registry import BASELINE, module
from paceline.report import step_observer, trace
from paceline.report.host_health import HostHealth
from paceline.report.log import log
from paceline.report.status_server import StatusServer, stacks, status
from paceline.report.step_record import StepRecord
from paceline.report.stragglers import Stragglers
from paceline.step.ahead import Ahead
from paceline.step.average import average
from paceline.step.forward_state_sync import ForwardStateSync
from paceline.step.hints import Hints
from paceline.step.like_torch import UnreadLoss
from paceline.step.rebalance import Rebalance
from paceline.step.redistribution import Redistribution
from paceline.step.replica_sync import ReplicaSync
from paceline.step.run_state import RunState
from paceline.step.step import ComputeGradient, step

if TYPE_CHECKING:
    from paceline.elastic.joiner import JoiningLink
    from paceline.engine.checks.wrapped_models import Wrappers


class Training:
    """``over``: this process has ended the training; ``broken``: the connection failed, and its model may join again.

    ``wrappers``: wrappers such as DDP around or inside the model of `join`.
    """

    over = False
    broken = False
    wrappers: Wrappers | None = None

    def __init__(
        self,
        job: Job,
        engine: contract.Engine,
        exchange: contract.Exchange,
        codec: contract.Codec,
        members: Members | None,
        world: LaunchEnvironment,
        folder: Path | None,
        keep: int = 2,
        joining_link: JoiningLink | None = None,
    ):
        self.linked, self.members = members is not None, members or alone_members()
        self.equivalence_run = EquivalenceRun.of_environment()
        if self.equivalence_run:
            self.equivalence_run.prepare(job.model)
            job.loss = self.equivalence_run.cast_loss(job.loss)
        profile_path = os.environ.get("PACELINE_PROFILE")
        # in a trial, a profile or an equivalence run, the user's run folder is neither read nor written
        watched = bool(profile_path or self.equivalence_run or os.environ.get("PACELINE_TRIAL"))
        started = start(job, engine, exchange, codec, self.members, self.linked, world, watched)
        run, self._changes = started.run, started.changes
        self.run, run.folder = run, folder
        if self.equivalence_run and run.leader:
            self.equivalence_run.begin(engine.state())
        self.stopwatch = Stopwatch.of_environment(run.leader)
        self.run_folder = RunFolder(None if watched else folder, run.record)
        if not world.join_ticket:  # an error here ends all processes; it is no node failure
            alone(run.control, lambda: run.leader, self.run_folder.open)
        self._hints = Hints(run)
        self._warn(codec)
        if engine.precision == "fp16":
            run.scaler = Scaler(moves=True)
        self.saver = Saver(run, keep)
        self._view_changes, control = ViewChangeHandler(run, self.run_folder), started.fault_tolerant
        self.admission = Admission(run, started.digests, self.end, self._save_and_exit) if control else None
        self._view_changes.observers += [self.admission] if self.admission else []
        if control:
            control.rows = lambda: run.shares[run.world.node]
        self.joiner = JoinClient(run, joining_link, started.digests, self._check_signal) if world.join_ticket else None
        measured = job.shares == "measured"
        self._stragglers = Stragglers(run.record, run.members.peer_status, measured) if members else None
        self.steps = StepRecord(run.record, engine, run.exchange, run.control)
        in_step = run.exchange.consensus == "step"
        self.tensors = MetricTensors(engine, run.control, run.activity, in_step)
        run.observers = self._observers(started.several, Path(profile_path) if profile_path else None)
        if isinstance(engine, ReadsLater) and Ahead.serves(run, engine):
            run.ahead = Ahead(run, engine)
        self._report()
        self._interrupt = self._listen()
        self.watch_join_desk()
        note("met")
        self._own_steps = OwnSteps(job.optimizer)
        if world.world_size > 1 and not world.join_ticket and not watched:  # a joining node follows the members' steps
            self._unstepped = True
            atexit.register(self._log_unstepped)
        if members:
            atexit.register(_leave, run)
        if run.exchange.overlap == "forward" or run.ahead:
            atexit.register(self._settle_at_exit)
        if self.joiner:
            self.joiner.request_position()
        for change in self._changes:
            self._view_changes.assume_role(change)
        run.control.on_view_change = self._view_changes.on_view_change

    def announce_met(self) -> None:
        """Logs the nodes that failed during the rendezvous, after the event log has the join."""
        for change in self._changes:
            self._view_changes.announce(change)

    def _warn(self, codec: contract.Codec) -> None:
        run = self.run
        if run.leader and (stale := plan_cache.confirm(run.job)):
            log.info(f"{stale}; the next start measures again")
            run.record.write("hint", text=stale)
        num_nodes, rounds = run.world.num_nodes, codec.fidelity == "rounded" and not run.link.accumulates_fp32
        if run.leader and num_nodes > 2 and rounds and _sums(codec, run.engine, num_nodes):
            text = f"the all-reduce adds in {codec.wire}: with {num_nodes} nodes each sum is rounded once per node"
            log.info(text)
            run.record.write("hint", text=text)

    def _observers(self, several: bool, profile_path: Path | None) -> list[step_observer.StepObserver]:
        """The observers of the steps, in the order in which they are called."""
        run, job, engine = self.run, self.run.job, self.run.engine
        in_step, distributed = run.exchange.consensus == "step", run.world.num_nodes > 1 or bool(run.world.join_ticket)
        found: list[step_observer.StepObserver] = [self.steps, self.tensors]
        if self.admission:
            found.append(self.admission)
        if self.admission and not in_step:
            found.append(redistribution := Redistribution(run))
            self._view_changes.observers.append(redistribution)
        if distributed and in_step and not run.watched:
            found.append(ReplicaSync(run))
        if in_step and (several or job.accumulate > 1) and isinstance(engine, module("engine", BASELINE).Engine):
            answered = engine.answered if job.batch_norm == "sync" else None
            broadcast = job.buffers == "broadcast"
            found.append(ForwardStateSync(run, engine.moving, broadcast, answered, job.accumulate))
        found += [Rebalance(run, None if run.watched else self._stragglers), self._hints]
        if not run.watched and not run.world.join_ticket and (steps := trace.requested(run.control)):
            found.append(trace.Tracer(run, self.members.link, *steps))
        if profile_path or self.stopwatch:
            from paceline.planner.measure.profile_job import ProfileJob  # not needed in training

            found.append(ProfileJob(run, self.stopwatch, profile_path))
        if self.equivalence_run:
            from paceline.planner.diagnose.notes import EquivalenceObserver  # not needed in training

            found.append(EquivalenceObserver(run, self.equivalence_run))
        return found

    def _report(self) -> None:
        """Publishes the state of this process while it trains."""
        run, engine = self.run, self.run.engine
        run.activity.notice = self._notice
        monitored = self.linked and not run.watched
        self._host_health = HostHealth(run.activity, lambda: engine.pids).start() if monitored else None
        reachable = (run.folder or os.environ.get("PACELINE_RUN")) and not run.watched
        self._status_server = StatusServer(partial(status, run)) if reachable else None
        if run.world.local_size > 1 and run.world.local_rank == 0:
            run.activity.siblings = lambda: stacks(engine.pids[1:])

    def _notice(self, text: str) -> None:
        """Reports an operation that takes longer than expected."""
        log.warning(text)
        self.run.record.write("late", step=self.run.num_steps, text=text)

    def step(self, batch: GlobalBatch, gradient: ComputeGradient | None = None) -> float | UnreadLoss:
        run, cursor = self.run, self.run.cursor
        if self.over:
            raise _ended("a step")
        if not self._stepped:
            self._own_steps.refuse()
            self._stepped, self._unstepped = True, False
        if self.joiner:
            raise ValueError("a joining node must get its samples from pace.batches; pass the dataset to it")
        if self.admission:
            self.admission.before(batch, gradient is not None)
        epoch = cursor.epoch if batch.epoch is None else batch.epoch
        rate = run.job.optimizer.param_groups[0].get("lr")
        facts = {"epoch": epoch} | ({} if rate is None else {"lr": float(rate)})
        if batch.step is not None:
            facts |= {"batch": batch.step, "rows": int(batch.weight), "ends_epoch": batch.ends_epoch}
        try:
            vote = step(run, batch, gradient, **facts).vote
        except LinkError:
            self.broken = True
            # a thread inside the network library at Python's exit would abort the process
            run.exchange.close()
            raise
        except (NotFinite, NoGradient, UnlikeOptions) as error:
            error.reported = getattr(error, "reported", not run.speaks)  # type: ignore[union-attr]
            raise
        if batch.step is not None:
            cursor.epoch, cursor.next_step = (epoch + 1, 0) if batch.ends_epoch else (epoch, batch.step + 1)
        if vote.stop_signal or vote.launcher_lost:
            self.end(vote.stop_signal or HANGUP)
        if run.ahead and (loss := run.ahead.loss()) is not None:
            return loss
        return vote.loss_sum / vote.weight if vote.weight else float("nan")

    def read(self) -> StepRecord:
        """The record of the steps, once the numbers of the last one have been read. Raises NotFinite, NoGradient."""
        if self.run.ahead:
            self.run.settle()
        return self.steps

    @property
    def outcome(self) -> StepOutcome:
        self.read()
        return self.run.last

    _stepped = False
    _unstepped = False  # whether to report at the end that `step` was never called

    def _log_unstepped(self) -> str:
        """At the end: a text if each process trained without `step`; logged here if the script did not call `close`."""
        text = unstepped_text(self._own_steps.count, self.run.world.world_size) if self._unstepped else ""
        if text:
            self._unstepped = False
            note(UNSTEPPED)
            if self.run.leader and not self.over:
                log.error(text)
        return text

    @contextlib.contextmanager
    def collective(self, doing: str) -> Iterator[None]:
        """The context of a collective operation between two steps. A LinkError names the operation. Raises RuntimeError
        where the other processes have ended."""
        if self.over and self.run.world.world_size > 1:
            raise _ended(doing)
        with self.run.activity.at(doing):
            try:
                yield
            except LinkError as error:
                self.broken = True
                self.run.exchange.close()  # as in a step
                text = f"{self.run.identity}, {doing} at step {self.run.num_steps}: {error}"
                raise LinkError(text, error.peer, error.resumes) from error

    def save(self, folder: Path, wait: bool = True) -> Path | None:
        """Saves a checkpoint; returns the path, in the leader. Collective. Raises CheckpointError."""
        with self.collective("saving"):
            return None if self.run.watched else self.saver.save(folder, wait)

    def _listen(self) -> Interrupt | None:
        """Handles signals. A node that has lost its launcher continues, unless all nodes have."""
        signals = (*(SIGNALS if self.run.folder else ()), *([HANGUP] if self.run.world.min_nodes else ()))
        return Interrupt(self._note_signal, signals) if signals and not self.run.watched else None

    def _note_signal(self, number: int) -> None:
        if number == HANGUP:
            self.run.launcher_lost = True
        else:
            self.run.stop_signal = number

    def end(self, number: int) -> None:
        if number == FAILED:
            self.saver.raise_failure()
            return  # the error was raised already
        path = self.save(self.run.folder) if self.run.folder else None
        if path:
            log.info(f"stopped by signal {number} after step {self.run.num_steps}; saved {path}")
        self.close(f"signal {number}")
        raise Stopped(number)

    def _save_and_exit(self, why: str) -> None:
        """Training cannot continue now: saves a checkpoint, from which it can be resumed, and exits."""
        path = self.save(self.run.folder) if self.run.folder else None
        if self.run.leader:
            saved_text = f"saved {path}" if path else "there is no folder to save in, so the run starts over"
            text = f"{why}; {saved_text}; exit code {RESUME_CODE}: resume the run from its newest checkpoint"
            log.error(text)
        self.close(why)
        raise Resume

    def _check_signal(self) -> None:
        """Called while this process waits for others: after a signal it ends, as after a step."""
        if number := self.run.stop_signal:
            raise Stopped(number)

    def watch_join_desk(self) -> None:
        """Lets signals end this process also while it is disconnected from the others."""
        if desk := self.run.members.join_desk:
            desk.glance = self._check_signal

    def close(self, reason: str = "finished") -> None:
        """Ends normally, together with all processes. Called at the end of a ``with`` block; ``reason`` is logged."""
        if self.over:
            return
        stop_signal, self.run.stop_signal = self.run.stop_signal, 0
        self.run.settle()
        try:
            with self.collective("leaving"):
                average(self.run, state=True)
                if self.run.control.tolerates_loss:
                    self.run.control.all_gather(b"")  # no process ends before all have the outcome of the last step
        except LinkError as error:
            self.leave(f"LinkError: {error}")
            raise
        unwritten = self.leave(reason)
        self.run.exchange.close()
        self.run.engine.close()
        if self.linked:
            self.run.link.close()
        if unwritten:
            raise unwritten
        if text := self._log_unstepped():
            never = NeverStepped(text)
            never.reported = not self.run.leader  # type: ignore[attr-defined]
            raise never
        if stop_signal and reason == "finished":
            raise Stopped(stop_signal)  # received after the last step: the exit code shows the signal

    def leave(self, reason: str, wait: bool = True) -> Exception | None:
        """Ends all threads and waits for the checkpoint writer. Returns the writer's error, if any."""
        self.over = True
        if self.run.ahead:
            with contextlib.suppress(Exception):  # the record has the last step, too
                self.run.ahead.read()
        self._own_steps.end()
        separate(self.run.job.optimizer)
        if self.wrappers:
            self.wrappers.restore()
        if self._interrupt:
            self._interrupt.close()
        if self._status_server:
            self._status_server.close()
        if self._host_health:
            self._host_health.stop()
        if self._stragglers:
            self._stragglers.close()
        unwritten = self.saver.end(wait)
        self.run_folder.close(f"{type(unwritten).__name__}: {unwritten}" if unwritten else reason)
        return unwritten

    def _settle_at_exit(self) -> None:
        if not getattr(sys.excepthook, "failed", False):
            try:
                self.run.settle()
            except (NotFinite, NoGradient) as error:
                log.error(str(error))
            except LinkError:
                pass


def _ended(doing: str) -> RuntimeError:
    return RuntimeError(
        f"{doing} is not possible any more: this training has ended, with pace.close() or its `with` block; do it "
        f"before that, in every process, or join the model again"
    )


def _leave(run: RunState) -> None:
    """At exit. After an error peers hear nothing, and see a failure at once: Python may take seconds to end, without
    a thread that sends heartbeats."""
    if getattr(sys.excepthook, "failed", False):
        run.link.abandon()
    else:
        run.link.close()


def _sums(codec: contract.Codec, engine: contract.Engine, num_nodes: int) -> bool:
    """Whether gradients are added while they are sent."""
    dtypes = {weight.dtype for weight in engine.weights}  # none in an emulation
    return any(each.operation == SUM for one in dtypes for each in codec.rounds(engine.buckets[0], num_nodes, one))
