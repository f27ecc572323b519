"""What the user holds: a model being trained by one or many."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from paceline import contract
from paceline.checkpoint import auto_resume
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.export import export
from paceline.checkpoint.run_lock import CheckpointError, claim
from paceline.checkpoint.saver import FAILED, Saving
from paceline.contract import LinkError, NeverStepped, NoGradient, NotFinite, UnlikeOptions
from paceline.data import batches
from paceline.elastic import assignment, membership
from paceline.elastic.admission import Welcome
from paceline.elastic.consistency import compare, compare_data, data_facts, digests, facts, thin
from paceline.elastic.fault_tolerant import Surviving
from paceline.elastic.joiner import Entry
from paceline.elastic.replica_sync import Drift
from paceline.engine import sequential
from paceline.engine.checks.eval_mode import asleep
from paceline.engine.checks.norm_layers import own_statistics
from paceline.engine.checks.own_steps import OwnSteps
from paceline.engine.compute import batch as batches_
from paceline.engine.compute.evaluate import evaluate
from paceline.engine.compute.precision import Scaler
from paceline.environment import World
from paceline.exchange.flow import buffer_broadcast
from paceline.exchange.flow.broadcast import marks, plant
from paceline.exchange.flow.control import alone
from paceline.exchange.flow.forward_state_sync import Moved
from paceline.job import Job
from paceline.launch.signals import HANGUP, RESUME_CODE, SIGNALS, Interrupt, Resume, Stopped
from paceline.launch.supervise import never_stepped, process_status
from paceline.launch.supervise.never_stepped import note
from paceline.link.net.metered import Ledger
from paceline.manual_loop import OwnLoop
from paceline.planner import plan_cache
from paceline.planner.diagnose.equivalence import Witness
from paceline.planner.measure.stopwatch import Stopwatch, times
from paceline.report.activity import Whereabouts, say
from paceline.report.host_health import Signs
from paceline.report.record import Record
from paceline.report.status_server import Live, stacks, tell
from paceline.report.stragglers import Stragglers
from paceline.report.trace import Tracer
from paceline.step import Loop

if TYPE_CHECKING:
    from paceline.elastic.joiner import Late
    from paceline.engine.checks.wrapped_models import Wrappers
    from paceline.report.usage import Usage

MOST_LOSSES = 16  # during one evaluation


class Pace:
    """A model being trained by one or many. Made by `join`.

    ``epoch`` and ``next_step``: where the next batch lies. ``facts``: whatever JSON can hold, kept with every
    checkpoint. ``leader``: true in one process of all.
    """

    def __init__(
        self,
        job: Job,
        engine: contract.Engine,
        exchange: contract.Exchange,
        codec: contract.Codec,
        link: contract.Link | None,
        world: World,
        folder: Path | None,
        keep: int = 2,
        late: Late | None = None,
    ):
        self.job, self.engine, self.world, self.link = job, engine, world, link
        self.folder, self.keep, self.codec = folder, keep, codec
        self.methods = {"exchange": _kind(exchange), "codec": _kind(codec)}
        self.witness = Witness.of_environment()
        if self.witness:
            self.witness.prepare(job.model)
            job.loss = self.witness.cast_loss(job.loss)
        several = world.size > 1 or engine.num_shares or getattr(engine, "num_replicas", 1) > 1
        engine.divided = bool(several or job.accumulate > 1 or world.least)
        engine.open(job.model, job.optimizer, job.loss, job.metric)
        if engine.divided:
            job.check_divided()
        if several:
            job.check_norms()
        self.leader = world.node == 0 and world.local_rank == 0 and not world.late
        said: dict[str, str] = {}
        if link:
            compare(link, job, engine, exchange, codec)
            exchange.thin = thin(link, engine)
            if world.least:
                said = digests(facts(job, engine, exchange, codec), exchange.thin)
        ledger = self.ledger = Ledger(link or _alone())
        self.whereabouts: Whereabouts = ledger.whereabouts or Whereabouts()
        ledger.whereabouts = self.whereabouts
        seat = assignment.place(job, world, engine.num_shares)
        exchange.multiply, exchange.hands = engine.multiply, world.local_size
        surviving: Surviving | None = None
        if world.least:
            if link:
                ledger.stand_by(world.least)
            surviving = exchange = Surviving(exchange, engine.relink)
            surviving.rows = lambda: seat.dealt(job.batch_size)[world.node]
        rows = max(seat.dealt(job.batch_size))
        if world.local_rank == 0:
            exchange.open(engine.specs, ledger, codec, rows, job.seed, engine.absorbs)
        else:
            exchange.link = contract.Link()
            exchange.link.size, exchange.link.grows = world.num_nodes, bool(world.late)
            exchange.link.whereabouts = self.whereabouts
        self.exchange = engine.relay(exchange)
        met: list[contract.Regroup] = []  # while all join
        self.exchange.regrouped = met.append
        generation = self.exchange.hand(str(exchange.link.generation).encode())
        if world.local_rank:
            self.exchange.link.generation = int(bytes(generation))
        if job.batch_norm == "sync":
            engine.sync_norm(ledger if link else None)
        self.exchange.spread(engine.weights)
        self.exchange.spread(engine.buffers)
        if world.size > 1:
            buffer_broadcast.spread_sparse(job.model, engine, self.exchange)
        if world.size > 1:
            plant(job.model, self.exchange, exchange, engine.seat)
            engine.still = marks(job.model)
        balance = None
        if world.late:
            self._limits = assignment.alone(seat, job, engine, self.exchange)
        else:
            seat, balance, self._limits = assignment.settle(seat, job, engine, self.exchange)
        if world.size > 1:
            # dropout masks of different processes must differ, and those of two equal runs must not
            torch.manual_seed(job.seed * 100_003 + world.rank)
        if self.witness and self.leader:
            self.witness.begin(engine.state())
        self.stopwatch = Stopwatch.of_environment(self.leader)
        form = os.environ.get("PACELINE_PROFILE")
        self.form = Path(form) if form else None
        self.asked_epochs = 0
        # a trial, a profile or a comparison: the user's run is neither read nor written
        self.watched = bool(self.stopwatch or self.form or self.witness)
        self.record = Record()
        if not world.late:  # who is refused ends all, and is no lost node that the others go on without
            alone(self, lambda: self.leader, lambda: self._open(folder))
        if self.leader and (stale := plan_cache.confirm(job)):
            print(f"paceline: {stale}; the next start measures again", file=sys.stderr)
            self.record.write("hint", text=stale)
        wide = link is not None and link.wide
        if self.leader and world.num_nodes > 2 and codec.sums and codec.fidelity == "rounded" and not wide:
            text = f"the wire adds in {codec.wire}: among {world.num_nodes} nodes a sum is rounded once more by each"
            print(f"paceline: {text}", file=sys.stderr)
            self.record.write("hint", text=text)
        self._follows = job.shares == "measured" and not seat.virtual and not self.watched
        together = (world.num_nodes > 1 or world.late) and exchange.consensus == "step" and not self.watched
        # with the same words from everyone, one process says them
        self._speaks = self.leader if exchange.consensus == "step" else world.local_rank == 0
        scaler = Scaler(moves=True) if _precision(engine) == "fp16" else None
        self.loop = Loop(
            engine,
            self.exchange,
            seat,
            self.record,
            job.clip,
            who=self._who(),
            schedule=job.scheduler,
            scaler=scaler,
            balance=balance if self._follows else None,
            drift=Drift(engine, self.exchange, self.record, self.leader, divided=max(world.sizes) > 1)
            if together
            else None,
            whereabouts=self.whereabouts,
            stragglers=self._stragglers() if self.leader and link else None,
        )
        if exchange.consensus == "step" and (several or job.accumulate > 1):
            self.loop.moved = self._moved()
        self.whereabouts.notice = self._notice
        self._signs = Signs(self.whereabouts, lambda: engine.pids).start() if link and not self.watched else None
        asked = (folder or os.environ.get("PACELINE_RUN")) and not self.watched
        self._live = Live(partial(tell, self)) if asked else None
        if world.local_size > 1 and world.local_rank == 0:
            self.whereabouts.siblings = lambda: stacks(engine.pids[1:])
        self.exchange.regrouped = partial(membership.regroup, self)
        if surviving:
            surviving.rows = lambda: self.shares[self.world.node]
        self.tracer = None if self.watched else Tracer.asked(self.loop, job.model, world, folder, ledger)
        self.agreement = contract.Agreement(contract.Verdict.APPLY)
        self.facts: dict[str, Any] = {}
        self.epoch = self.next_step = self.began = 0
        self._resumed, self._saving = False, Saving(self)
        self._own = OwnLoop(self)
        self._usage: Usage | None = None
        self._welcome = Welcome(self, said) if surviving else None
        if self._welcome:
            self.loop.kept, self.loop.rejoin = self._welcome.keep, self._welcome.rejoin
        self._entry = Entry(self, late, said) if world.late else None
        self._interrupt = self._interrupts()
        self.heed()
        note("met")
        self._own_steps = OwnSteps(job.optimizer)
        if world.size > 1 and not world.late and not self.watched:  # who comes late follows the others' steps
            self._unstepped = True
            atexit.register(self._say_unstepped)
        if link:
            atexit.register(_leave, ledger)
            if exchange.overlap == "forward":
                atexit.register(self._settle_at_exit)
        if self._entry:
            self._entry.hello()
        self._met = met
        for news in met:
            membership.move(self, news)

    def _open(self, folder: Path | None) -> None:
        if folder and not self.watched:
            try:
                self._claim = claim(folder)
                self.record.open(folder)
            except CheckpointError:
                raise
            except OSError as error:
                raise CheckpointError(
                    f"the run's folder {folder} cannot be written on {socket.gethostname()} "
                    f"({error.strerror or error}); give another: --out, PACELINE_FOLDER, or join(folder=)"
                ) from error

    _claim: int | None = None  # on the folder, while this process writes there

    def _who(self) -> str:
        world, host = self.world, os.environ.get("PACELINE_HOST", socket.gethostname())
        part = f", local rank {world.local_rank}" if world.local_size > 1 else ""
        return f"rank {world.node} of {world.num_nodes} on {host}{part}"

    def _moved(self) -> Moved | None:
        engine, job = self.engine, self.job
        if not isinstance(engine, sequential.Engine):
            return None
        answered = engine.answered if job.batch_norm == "sync" else None
        return Moved(
            engine.moving,
            self.exchange,
            self.record,
            lambda: self.world.rank,
            lambda: self.leader,
            job.buffers == "broadcast",
            answered,
            job.accumulate,
        )

    def _stragglers(self) -> Stragglers | None:
        return None if self.watched else Stragglers(self.record, self.ledger.everyone, self.job.shares == "measured")

    def _notice(self, text: str) -> None:
        """Something lasts longer than it should."""
        say(text)
        self.record.write("late", step=self.loop.num_steps, text=text)

    # the data

    calls = number = 0  # of `batches`, up to now; among the joins of the script
    between = False  # one of these calls is over, and the next has not begun
    _first_call = 0  # that was not over when the checkpoint was made
    _data: Mapping[str, Any] = {}  # what `compare.data_facts` says of the last that `batches` was given
    _dataset: Any = None

    def batches(self, dataset: Any, epochs: int = 1, shuffle: bool = True, workers: int = 0) -> Iterator[batches.Batch]:
        """Every global batch, as the same sequence on any number of nodes; `step` takes this node's share.

        ``dataset``: a map-style Dataset, a DataLoader, or an iterable dataset. Epochs count on from call to call. After
        `restore`, the first call goes on where the checkpoint was made, and ends where it would have ended.
        """
        self.asked_epochs, self.calls = epochs, self.calls + 1
        auto_resume.begin()
        if self.calls < self._first_call:
            return  # had ended before the checkpoint
        auto_resume.arrive(self)
        if not self._resumed:
            self.epoch, self.next_step = self.epoch + (self.next_step > 0), 0
            self.began = self.epoch
        self._resumed = False
        first = not self._data
        if first or (self._welcome and dataset is not self._dataset):  # a node that comes late is compared with it
            self._data, self._dataset = data_facts(dataset), dataset
        if self._entry:
            if not self._entry.enter(epochs):
                return
            self._entry = None  # the others have asked each other already
            process_status.report(joined=True)
        elif first:
            with self._among_all("comparing datasets"):
                compare_data(self.exchange, self._data)
        last = sys.maxsize if self.stopwatch else self.began + epochs  # a trial ends when it has enough steps
        start = self.epoch, self.next_step
        job = self.job
        source = dataset, job.batch_size, last, job.seed, lambda: self.loop.seat, shuffle
        self.between = False
        try:
            for batch in batches.batches(*source, start=start, workers=workers, times=times()):
                yield batch
                if self.stopwatch:
                    self.stopwatch.resume()  # what the loop did after its step (evaluation) is not the step's
        finally:
            self.between = True

    def rows(self, batch: Any) -> Any:
        """This process's rows of a batch, on the model's device, for a loop of your own; None if it has none."""
        return self._own.rows(batch)

    @property
    def num_steps(self) -> int:
        """Steps so far, those before a checkpoint included: the same number in every process, also of a late node."""
        return self.loop.num_steps

    @property
    def shares(self) -> tuple[int, ...]:
        """Each node's rows of a whole global batch, as they are dealt at present."""
        dealt: tuple[int, ...] = self.loop.seat.dealt(self.job.batch_size)
        return dealt

    @property
    def terms(self) -> dict[str, float]:
        """Each named part of the last step's loss, as a global mean, where the loss is a dict."""
        return self.loop.terms

    # the step

    def step(self, batch: Any) -> float:
        """Forward, backward, agree, update. Returns the mean loss over the global batch.

        ``batch`` comes from `batches`, or is this process's own rows, shaped as the dataset would give them.
        Raises LinkError, NotFinite (a FloatingPointError), NoGradient (a RuntimeError), UnlikeOptions (a ValueError),
        CheckpointError once, after the step, where ``save(wait=False)`` could not write, and `Stopped` (a SystemExit)
        after a signal, once all is saved.
        """
        if not hasattr(batch, "share"):
            batch = batches.Given(batch, float(self.job.batch_size))
        return self._step(batch)

    def _step(self, batch: Any, gradient: Any = None) -> float:
        where = getattr(batch, "epoch", self.epoch), getattr(batch, "step", None)
        if self.form or self.stopwatch:
            from paceline.planner.measure import profile_job  # what it needs, training does not

            batch = profile_job.answer(self, batch, gradient)
        if not self._stepped:
            self._own_steps.refuse()
            self._stepped, self._unstepped = True, False
        if self.job.model.training is not self._mode:
            self._look_at_mode()
        if self._entry:
            raise ValueError("a node that comes late is dealt its rows by pace.batches alone; give it the dataset")
        auto_resume.missed(self)
        if self._welcome:
            self._welcome.before(batch, gradient is not None)
        ends = getattr(batch, "ends_epoch", False)
        rate = self.job.optimizer.param_groups[0].get("lr")
        rates = {"epoch": where[0]} | ({} if rate is None else {"lr": float(rate)})
        if where[1] is not None:
            rates |= {"batch": where[1], "rows": int(batch.weight), "ends_epoch": ends}
        try:
            shared = self.witness.deal(batch, batches_.mapped) if self.witness else batch
            self.agreement = (self.tracer or self.loop).step(shared, gradient, **rates)
        except LinkError:
            # a thread still inside the network library when Python ends would abort the process
            self.exchange.close()
            raise
        except (NotFinite, NoGradient, UnlikeOptions) as error:
            error.told = getattr(error, "told", not self._speaks)  # type: ignore[union-attr]
            raise
        if where[1] is not None:
            self.epoch, self.next_step = (where[0] + 1, 0) if ends else (where[0], where[1] + 1)
        if self.engine.hint and not self._told_hint:
            self._told_hint = True
            self._hint(self.engine.hint)
        ballot = self.agreement.ballot
        loss = ballot.loss_sum / ballot.weight if ballot.weight else float("nan")
        if self.stopwatch:
            alike = self.exchange.consensus == "step" or self.world.num_nodes == 1
            slowest_s = max((busy for busy, _ in ballot.paces), default=None)
            self.stopwatch.tick(batch.weight, ballot.seconds if alike else slowest_s)
        if self.witness:
            from paceline.planner.diagnose import notes  # what it needs, training does not

            notes.after(self, loss, own_loop=gradient is not None)
        if ballot.stop or ballot.hung:
            self._end(ballot.stop or HANGUP)
        return loss

    _stepped = False
    _unstepped = False  # until the first step: whether to say at the end that there was none

    def _say_unstepped(self) -> str:
        """At the end: whether each process trained alone, which a script that does not close is told here."""
        text = never_stepped.words(self._own_steps.count, self.world.size) if self._unstepped else ""
        if text:
            self._unstepped = False
            note("unstepped")
            if self.leader and not self.over:
                sys.stderr.write(f"paceline: {text}\n")
        return text

    _mode: bool | None = None  # the model's, in the last step
    _told_mode = _told_norms = _told_hint = False

    def _look_at_mode(self) -> None:
        """Before the first step, and where the mode has changed since the last; it is said once."""
        self._mode = self.job.model.training
        if not self._told_mode and (text := asleep(self.job.model, self.num_steps)):
            self._told_mode = True
            self._hint(text)
        local = self.engine.divided and self.job.batch_norm == "local"
        if local and not self._told_norms and (text := own_statistics(self.job.model)):
            self._told_norms = True
            self._hint(text)

    def _hint(self, text: str) -> None:
        if self.leader and not self.watched:
            print(f"paceline: {text}", file=sys.stderr)
            self.record.write("hint", text=text)

    def backward(self, loss: Any, rows: int | None = None) -> None:
        """For a loop of your own: adds the gradient of ``loss``, a mean over this process's rows or (sum, weight).

        May be called several times before `update` (several losses over the same rows). ``rows``: how many the mean is
        over, where they did not come from `rows`. Nothing leaves before `update`: communication is not overlapped.
        """
        self._own.backward(loss, rows)

    def clip(self, norm: float) -> None:
        """Clips the next `update` by the global norm of everyone's gradient."""
        self._own.clip(norm)

    def update(self) -> float:
        """After `backward`: everyone's gradients are added up and applied. Returns the global mean loss."""
        return self._own.update()

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the last step's gradient, before clipping; None with overlap="forward"."""
        return self.engine.norm

    def settle(self) -> None:
        """With overlap="forward": waits for the last step's update, before you read weights yourself between steps.

        `save`, `evaluate`, `export`, `close`, ``state_dict`` and calls of the model do so by themselves.
        """
        try:
            self.engine.settle()
        except NotFinite as error:
            error.told = not self._speaks  # type: ignore[attr-defined]
            raise

    def _settle_at_exit(self) -> None:
        if not getattr(sys.excepthook, "failed", False):
            with contextlib.suppress(LinkError, NotFinite):
                self.settle()

    @contextlib.contextmanager
    def _among_all(self, doing: str) -> Iterator[None]:
        """What all must do between two steps. A loss says what this process was doing."""
        with self.whereabouts.at(doing):
            try:
                yield
            except LinkError as error:
                self.exchange.close()  # as in a step
                words = f"{self.loop.who}, {doing} at step {self.num_steps}: {error}"
                raise LinkError(words, error.peer, error.resumes) from error

    # what must happen once, everywhere, or be counted once

    def once(self, work: Callable[..., Any] | None = None, *args: Any) -> Any:
        """Without arguments: whether this is the one process of its node that should do a thing.

        With a function: that process calls it while the others wait; its result there, None elsewhere.
        """
        chosen = self.world.local_rank == 0
        if work is None:
            return chosen
        with self._among_all("waiting for what one process does once"):
            return alone(self, lambda: chosen, lambda: work(*args))

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
        rows = rows or max(1, self.job.batch_size // self.world.size)
        if self.job.most_rows:
            rows = max(1, min(rows, self.job.most_rows // self.world.local_size))
        with self._among_all("evaluating"):
            self.exchange.level(self.engine.weights)
            for _ in range(MOST_LOSSES):
                buffer_broadcast.spread(self.job.model, self.engine, self.exchange)
                found = evaluate(
                    self.job.model, self.engine, self.exchange, self.loop.seat, dataset, metric, rows, self._seen
                )
                if found is not None:
                    if self.witness:
                        self.witness.evaluate(found, metric)
                    return found
            raise LinkError(f"{MOST_LOSSES} times not all counted who had begun; look at the network")

    def _seen(self, rows: Any) -> Any:
        return self.witness.cast(rows, batches_.mapped) if self.witness else rows

    # what is kept

    def save(self, folder: str | os.PathLike[str] | None = None, wait: bool = True) -> Path | None:
        """A checkpoint of everything, from which `restore` goes on bit by bit. All processes must call it.

        Written whole or not at all, to ``folder`` (the run's by default). Returns its path in the leader.

        With ``wait=False`` everything is copied, and written while training goes on. The next `save`, `restore` and
        the end wait for it; what went wrong is raised once, by every process, by the next `step` or by these.
        Raises CheckpointError (an OSError).
        """
        run = self._run_folder(folder, "save")
        with self._among_all("saving"):
            return None if self.watched else self._saving.save(run, wait)

    over = False  # it has left the others
    broken = False  # a step lost them: its model may join again
    row = ""  # the plan's row that this run obeys
    wrappers: Wrappers | None = None  # around or inside of the model that `join` was given

    def restore(self, folder: str | os.PathLike[str] | None = None) -> bool:
        """Goes on from the newest whole checkpoint of a run, or from one checkpoint. False if there is none.

        On the same number of processes and the same plan, every bit is as if nothing had happened. All must call it,
        and all take the same: the newest that every one of them can read. Raises ValueError for a checkpoint of another
        model, naming what differs, and where they have none in common; CheckpointError where all are damaged.
        """
        run = self._run_folder(folder, "restore")
        if self._entry:
            return True  # the others are further
        found = self._restore(run) is not None
        auto_resume.by_script(self, found)
        return found

    def resume_unasked(self) -> bool:
        """As `restore`, for a script that does not call it."""
        run = self._run_folder(None, "restore")
        kept = self._restore(run, lambda state: bool(state.get("join", 0) == self.number))
        if kept:
            self._first_call = kept.state.get("call", 0)
            self._resumed = not kept.state.get("between", False)  # else the next call is one of its own
        return kept is not None

    def _restore(self, run: Path, fits: Callable[[Any], bool] = bool) -> Checkpoint | None:
        with self._among_all("restoring"):
            kept = None if self.watched else self._saving.restore(run, fits)
        if self._welcome and kept:
            self._welcome.begin_again()
        self._resumed = self._resumed or kept is not None
        return kept

    def export(self, path: str | os.PathLike[str]) -> None:
        """The model's ``state_dict`` alone, as safetensors, written by one process, whole or not at all."""
        if self.watched:
            return
        self.settle()
        with self._among_all("exporting"):
            self.exchange.level(self.engine.weights)
            buffer_broadcast.spread(self.job.model, self.engine, self.exchange)
            alone(self, lambda: self.leader, lambda: export(Path(path), self.engine.state(), self.facts))

    def _run_folder(self, folder: str | os.PathLike[str] | None, doing: str) -> Path:
        if folder is None and self.folder is None:
            raise ValueError(f"{doing}() needs a folder: {doing}('runs/mine'), or join(folder='runs/mine')")
        return Path(folder) if folder is not None else self.folder or Path()

    # the end

    def _interrupts(self) -> Interrupt | None:
        """A node that is cut off from who started it trains on, where the others are not."""
        signals = (*(SIGNALS if self.folder else ()), *([HANGUP] if self.world.least else ()))
        return Interrupt(self._heard, signals) if signals and not self.watched else None

    def _heard(self, number: int) -> None:
        if number == HANGUP:
            self.loop.hung = True
        else:
            self.loop.stop = number

    def _end(self, number: int) -> None:
        if number == FAILED:
            self._saving.tell()
            return  # it has been told in between
        path = self.save() if self.folder else None
        if path:
            print(
                f"paceline: stopped by signal {number} after step {self.loop.num_steps}; saved {path}", file=sys.stderr
            )
        self.close(f"signal {number}")
        raise Stopped(number)

    def _give_up(self, why: str) -> None:
        """Training cannot continue here for now: all is kept for those who resume it."""
        path = self.save() if self.folder else None
        if self.leader:
            kept = f"saved {path}" if path else "there is no folder to save in, so the run begins anew"
            text = f"{why}; {kept}; exit code {RESUME_CODE}: resume the run from its newest checkpoint"
            sys.stderr.write(f"paceline: {text}\n")
        self.close(why)
        raise Resume

    def _glance(self) -> None:
        """While others are waited for: a signal ends what a step would have ended."""
        if number := self.loop.stop:
            raise Stopped(number)

    def heed(self) -> None:
        """Signals end this process also while it is cut off from the others."""
        if porter := self.ledger.porter:
            porter.glance = self._glance

    def close(self, reason: str = "finished") -> None:
        """Leaves the others in peace. Called at the end of a ``with`` block; ``reason`` is for the record."""
        late, self.loop.stop = self.loop.stop, 0
        self.settle()
        try:
            with self._among_all("leaving"):
                self.exchange.level(self.engine.weights)
                if self.exchange.survives:
                    self.exchange.gather(b"")  # nobody leaves before all know what became of the last step
        except LinkError as error:
            self._leave(f"LinkError: {error}")
            raise
        unwritten = self._leave(reason)
        self.exchange.close()
        self.engine.close()
        if self.link:
            self.ledger.close()
        if unwritten:
            raise unwritten
        if text := self._say_unstepped():
            never = NeverStepped(text)
            never.told = not self.leader  # type: ignore[attr-defined]
            raise never
        if late and reason == "finished":
            raise Stopped(late)  # heard after the last step: all is done, and whoever asked should know why it ended

    def _leave(self, reason: str, wait: bool = True) -> Exception | None:
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
        if self.loop.stragglers:
            self.loop.stragglers.close()
        unwritten = self._saving.end(wait)
        if self._usage:
            self._usage.stop()
        self.record.write("end", reason=f"{type(unwritten).__name__}: {unwritten}" if unwritten else reason)
        self.record.close()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None
        return unwritten

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
            unwritten = self._leave(f"{kind.__name__}: {error}", wait=not isinstance(error, KeyboardInterrupt))
            if unwritten:
                sys.stderr.write(f"paceline: {unwritten}\n")


def _kind(part: Any) -> str:
    """The name of a method, with that of the one it wraps."""
    name, inner = type(part).__module__.rpartition(".")[2], getattr(part, "inner", None)
    return f"{name}/{_kind(inner)}" if inner else name


def _leave(link: contract.Link) -> None:
    """A script that simply ends has left; one that ends by an error has died, and its peers should know."""
    if not getattr(sys.excepthook, "failed", False):
        link.close()


def _alone() -> contract.Link:
    from paceline.link.memory import world

    return world(1)[0]


def _precision(engine: contract.Engine) -> str:
    return getattr(getattr(engine, "numerics", None), "precision", "fp32")
