"""A training from the end of the rendezvous to its end: its steps, saving, signals, and the exit."""

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
from paceline.elastic.roles import Roles
from paceline.elastic.start import start
from paceline.engine.checks.own_steps import OwnSteps
from paceline.engine.compute.precision import Scaler
from paceline.environment import LaunchEnvironment
from paceline.errors import LinkError, NeverStepped, NoGradient, NotFinite, UnlikeOptions
from paceline.exchange.flow.control import alone
from paceline.job import Job
from paceline.launch.signals import HANGUP, RESUME_CODE, SIGNALS, Interrupt, Resume, Stopped
from paceline.launch.supervise.trained_alone import UNSTEPPED, note, unstepped_text
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
from paceline.step.average import average
from paceline.step.forward_state_sync import ForwardStateSync
from paceline.step.hints import Hints
from paceline.step.rebalance import Rebalance
from paceline.step.redeal import Redeal
from paceline.step.replica_sync import ReplicaSync
from paceline.step.run_state import RunState
from paceline.step.step import ComputeGradient, step

if TYPE_CHECKING:
    from paceline.elastic.joiner import JoiningLink
    from paceline.engine.checks.wrapped_models import Wrappers


class Training:
    """``over``: it has left the others; ``broken``: the connection failed, and its model may join again.

    ``wrappers``: around or inside of the model that `join` was given.
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
        late: JoiningLink | None = None,
    ):
        self.linked, self.members = members is not None, members or alone_members()
        self.witness = EquivalenceRun.of_environment()
        if self.witness:
            self.witness.prepare(job.model)
            job.loss = self.witness.cast_loss(job.loss)
        form = os.environ.get("PACELINE_PROFILE")
        # a trial, a profile or a comparison: the user's run is neither read nor written
        watched = bool(form or self.witness or os.environ.get("PACELINE_TRIAL"))
        met = start(job, engine, exchange, codec, self.members, self.linked, world, watched)
        run, self._met = met.run, met.met
        self.run, run.folder = run, folder
        if self.witness and run.leader:
            self.witness.begin(engine.state())
        self.stopwatch = Stopwatch.of_environment(run.leader)
        self.home = RunFolder(None if watched else folder, run.record)
        if not world.join_ticket:  # who is refused ends all, and is no lost node that the others go on without
            alone(run.control, lambda: run.leader, self.home.open)
        self._hints = Hints(run)
        self._warn(codec)
        if engine.precision == "fp16":
            run.scaler = Scaler(moves=True)
        self.saver = Saver(run, keep)
        self._roles = Roles(run, self.home)
        self.admission = Admission(run, met.said, self.end, self._give_up) if met.surviving else None
        self._roles.told += [self.admission] if self.admission else []
        if met.surviving:
            met.surviving.rows = lambda: run.shares[run.world.node]
        self.joiner = JoinClient(run, late, met.said, self._glance) if world.join_ticket else None
        measured = job.shares == "measured"
        self._stragglers = Stragglers(run.record, run.members.peer_status, measured) if members else None
        self.steps = StepRecord(run.record, engine, run.exchange, run.control)
        run.observers = self._observers(met.several, Path(form) if form else None)
        self._report()
        self._interrupt = self._listen()
        self.heed()
        note("met")
        self._own_steps = OwnSteps(job.optimizer)
        if world.world_size > 1 and not world.join_ticket and not watched:  # who comes late follows the others' steps
            self._unstepped = True
            atexit.register(self._log_unstepped)
        if members:
            atexit.register(_leave, run)
            if run.exchange.overlap == "forward":
                atexit.register(self._settle_at_exit)
        if self.joiner:
            self.joiner.hello()
        for news in self._met:
            self._roles.move(news)
        run.control.on_view_change = self._roles.on_view_change

    def announce_met(self) -> None:
        """Logs the nodes that failed while all joined, once the record has those that did."""
        for news in self._met:
            self._roles.announce(news)

    def _warn(self, codec: contract.Codec) -> None:
        run = self.run
        if run.leader and (stale := plan_cache.confirm(run.job)):
            log.info(f"{stale}; the next start measures again")
            run.record.write("hint", text=stale)
        rounds, num_nodes = codec.sums and codec.fidelity == "rounded", run.world.num_nodes
        if run.leader and num_nodes > 2 and rounds and not run.link.accumulates_fp32:
            text = f"the wire adds in {codec.wire}: among {num_nodes} nodes a sum is rounded once more by each"
            log.info(text)
            run.record.write("hint", text=text)

    def _observers(self, several: bool, form: Path | None) -> list[step_observer.StepObserver]:
        """Each is called after a step, before the next one."""
        run, job, engine = self.run, self.run.job, self.run.engine
        together, apart = run.exchange.consensus == "step", run.world.num_nodes > 1 or bool(run.world.join_ticket)
        found: list[step_observer.StepObserver] = [self.steps]
        if self.admission:
            found.append(self.admission)
        if self.admission and not together:
            found.append(redeal := Redeal(run))
            self._roles.told.append(redeal)
        if apart and together and not run.watched:
            found.append(ReplicaSync(run))
        if together and (several or job.accumulate > 1) and isinstance(engine, module("engine", BASELINE).Engine):
            answered = engine.answered if job.batch_norm == "sync" else None
            broadcast = job.buffers == "broadcast"
            found.append(ForwardStateSync(run, engine.moving, broadcast, answered, job.accumulate))
        found += [Rebalance(run, None if run.watched else self._stragglers), self._hints]
        if not run.watched and not run.world.join_ticket and (steps := trace.asked(run.control)):
            found.append(trace.Tracer(run, self.members.link, *steps))
        if form or self.stopwatch:
            from paceline.planner.measure.profile_job import ProfileJob  # what it needs, training does not

            found.append(ProfileJob(run, self.stopwatch, form))
        if self.witness:
            from paceline.planner.diagnose.notes import Comparison  # likewise

            found.append(Comparison(run, self.witness))
        return found

    def _report(self) -> None:
        """Publishes the state of this process while it trains."""
        run, engine = self.run, self.run.engine
        run.activity.notice = self._notice
        seen = self.linked and not run.watched
        self._signs = HostHealth(run.activity, lambda: engine.pids).start() if seen else None
        asked = (run.folder or os.environ.get("PACELINE_RUN")) and not run.watched
        self._live = StatusServer(partial(status, run)) if asked else None
        if run.world.local_size > 1 and run.world.local_rank == 0:
            run.activity.siblings = lambda: stacks(engine.pids[1:])

    def _notice(self, text: str) -> None:
        """Something lasts longer than it should."""
        log.warning(text)
        self.run.record.write("late", step=self.run.num_steps, text=text)

    def step(self, batch: GlobalBatch, gradient: ComputeGradient | None = None) -> float:
        run, cursor = self.run, self.run.cursor
        if not self._stepped:
            self._own_steps.refuse()
            self._stepped, self._unstepped = True, False
        if self.joiner:
            raise ValueError("a joining node gets its rows from pace.batches alone; give that the dataset")
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
            # a thread still inside the network library when Python ends would abort the process
            run.exchange.close()
            raise
        except (NotFinite, NoGradient, UnlikeOptions) as error:
            error.reported = getattr(error, "reported", not run.speaks)  # type: ignore[union-attr]
            raise
        if batch.step is not None:
            cursor.epoch, cursor.next_step = (epoch + 1, 0) if batch.ends_epoch else (epoch, batch.step + 1)
        if vote.stop_signal or vote.launcher_lost:
            self.end(vote.stop_signal or HANGUP)
        return vote.loss_sum / vote.weight if vote.weight else float("nan")

    _stepped = False
    _unstepped = False  # until the first step: whether to say at the end that there was none

    def _log_unstepped(self) -> str:
        """At the end: whether each process trained alone, which is logged here if the script did not close."""
        text = unstepped_text(self._own_steps.count, self.run.world.world_size) if self._unstepped else ""
        if text:
            self._unstepped = False
            note(UNSTEPPED)
            if self.run.leader and not self.over:
                log.error(text)
        return text

    @contextlib.contextmanager
    def among_all(self, doing: str) -> Iterator[None]:
        """What all must do between two steps. A LinkError names what this process was doing."""
        with self.run.activity.at(doing):
            try:
                yield
            except LinkError as error:
                self.broken = True
                self.run.exchange.close()  # as in a step
                text = f"{self.run.identity}, {doing} at step {self.run.num_steps}: {error}"
                raise LinkError(text, error.peer, error.resumes) from error

    def save(self, folder: Path, wait: bool = True) -> Path | None:
        """A checkpoint; the path, in the leader. Every process must call it. Raises CheckpointError."""
        with self.among_all("saving"):
            return None if self.run.watched else self.saver.save(folder, wait)

    def _listen(self) -> Interrupt | None:
        """A node that is cut off from its launcher trains on, where the others are not."""
        signals = (*(SIGNALS if self.run.folder else ()), *([HANGUP] if self.run.world.min_nodes else ()))
        return Interrupt(self._note_signal, signals) if signals and not self.run.watched else None

    def _note_signal(self, number: int) -> None:
        if number == HANGUP:
            self.run.launcher_lost = True
        else:
            self.run.stop_signal = number

    def end(self, number: int) -> None:
        if number == FAILED:
            self.saver.tell()
            return  # it has been told in between
        path = self.save(self.run.folder) if self.run.folder else None
        if path:
            log.info(f"stopped by signal {number} after step {self.run.num_steps}; saved {path}")
        self.close(f"signal {number}")
        raise Stopped(number)

    def _give_up(self, why: str) -> None:
        """Training cannot continue here for now: all is kept for those who resume it."""
        path = self.save(self.run.folder) if self.run.folder else None
        if self.run.leader:
            kept = f"saved {path}" if path else "there is no folder to save in, so the run begins anew"
            text = f"{why}; {kept}; exit code {RESUME_CODE}: resume the run from its newest checkpoint"
            log.error(text)
        self.close(why)
        raise Resume

    def _glance(self) -> None:
        """While others are waited for: a signal ends what a step would have ended."""
        if number := self.run.stop_signal:
            raise Stopped(number)

    def heed(self) -> None:
        """Signals end this process also while it is cut off from the others."""
        if desk := self.run.members.join_desk:
            desk.glance = self._glance

    def close(self, reason: str = "finished") -> None:
        """Leaves the others in peace. Called at the end of a ``with`` block; ``reason`` is for the record."""
        late, self.run.stop_signal = self.run.stop_signal, 0
        self.run.settle()
        try:
            with self.among_all("leaving"):
                average(self.run)
                if self.run.control.tolerates_loss:
                    self.run.control.all_gather(b"")  # nobody leaves before all know what became of the last step
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
            never.told = not self.run.leader  # type: ignore[attr-defined]
            raise never
        if late and reason == "finished":
            raise Stopped(late)  # heard after the last step: all is done, and whoever asked should know why it ended

    def leave(self, reason: str, wait: bool = True) -> Exception | None:
        """Once nothing is being written any more; what could not be."""
        self.over = True
        self._own_steps.end()
        if self.wrappers:
            self.wrappers.restore()
        if self._interrupt:
            self._interrupt.close()
        if self._live:
            self._live.close()
        if self._signs:
            self._signs.stop()
        if self._stragglers:
            self._stragglers.close()
        unwritten = self.saver.end(wait)
        self.home.close(f"{type(unwritten).__name__}: {unwritten}" if unwritten else reason)
        return unwritten

    def _settle_at_exit(self) -> None:
        if not getattr(sys.excepthook, "failed", False):
            with contextlib.suppress(LinkError, NotFinite):
                self.run.settle()


def _leave(run: RunState) -> None:
    """A script that simply ends has left; one that ends by an error has died, and its peers should know."""
    if not getattr(sys.excepthook, "failed", False):
        run.link.close()
