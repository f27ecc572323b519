"""Connects the axes: a job, an engine, a link, a codec and an exchange become one training session."""

from __future__ import annotations

import atexit
import dataclasses
import importlib.util
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from paceline import registry
from paceline.checkpoint import auto_resume
from paceline.contract import Codec, Engine, Exchange
from paceline.data import load_balance
from paceline.elastic.membership import Members, connect, joining
from paceline.engine.checks import join_arguments, wrapped_models
from paceline.engine.compute import deferred_update as overlaps
from paceline.engine.compute.precision import parse_row
from paceline.engine.node import affinity
from paceline.environment import LaunchEnvironment
from paceline.errors import CheckpointError, LinkError, NeverStepped, NoGradient, NotFinite, UnlikeOptions
from paceline.job import Job
from paceline.launch.machine import survey
from paceline.launch.signals import RESUME_CODE
from paceline.launch.supervise import process_status
from paceline.link.net.auth import secret_of_environment
from paceline.link.net.collective_run import Collective
from paceline.pace import Pace
from paceline.planner import plan_cache
from paceline.planner.diagnose import equivalence
from paceline.planner.measure import stopwatch
from paceline.report.log import configure, log
from paceline.training import Training

if TYPE_CHECKING:
    from paceline.elastic.joiner import JoiningLink

_here: list[Pace] = []  # that this process has joined, and not left
_joins = itertools.count()  # every process joins in the same order, so each join is a meeting of its own


def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any] | None = None,
    *,
    batch_size: int,
    clip: float | None = None,
    accumulate: int = 1,
    precision: str | None = None,
    scheduler: Any = None,
    batch_norm: str = "local",
    buffers: str = "own",
    seed: int = 0,
    metric: Callable[..., Any] | None = None,
    forward: Callable[..., Any] | None = None,
    engine: str | None = None,
    exchange: str = registry.EXCHANGE,
    codec: str = registry.CODEC,
    folder: str | os.PathLike[str] | None = None,
    keep: int = 2,
    shares: str | Sequence[float] | None = None,
    most_rows: int | None = None,
    overlap: str | None = None,
    reproducible: bool | int = False,
    encrypt: bool | None = None,
) -> Pace:
    """Joins this process to the training: alone, or one of many, with the same script.

    model, optimizer    yours, and they stay so: any nn.Module, any torch.optim optimizer but LBFGS; of a model in
                        DistributedDataParallel or DataParallel the module inside is trained
    loss                ``loss(output, target)``: a mean over rows, a (sum, weight), or a dict of means; None: the
                        output's own ``.loss``. With a parameter named ``batch`` it sees the whole batch
    batch_size          global: over all processes and nodes
    clip                the global norm that gradients are clipped by
    accumulate          micro-batches that a process computes its share in, for memory
    precision           "fp32", "bf16", "fp16" (with loss scaling); None: what the plan says
    scheduler           a torch.optim.lr_scheduler, stepped once per applied step
    batch_norm          "local": each process's own statistics, as DDP; "sync": those of the global batch
    buffers             that forward changes by a process's samples, such as a codebook: "own": each process keeps
                        its own, and rank 0's are saved; "broadcast": rank 0's everywhere after each step, as DDP
    seed                of the order of samples, and of each process's randomness
    metric              ``metric(output, target)``, a sum over rows, for `evaluate` and the record
    forward             ``forward(model, batch)``, where model(*batch[:-1]) or model(**batch) is not the call
    engine              how this node computes; else PACELINE_ENGINE, else the plan kept for this job, else threads
    exchange, codec     how nodes agree, and what a gradient looks like on the wire
    folder, keep        the run's folder (record, checkpoints; else PACELINE_FOLDER), and how many checkpoints stay

    shares              of the global batch on several nodes: "measured": as fast as each is, re-dealt when that
                        changes; "equal"; or numbers in proportion, one per node; else PACELINE_SHARES, else measured
    most_rows           of the global batch that this node ever has, for memory
    overlap             "backward": a step ends with its update; "forward": gradients arrive, and are applied, while the
                        next step's forward pass runs, for slow networks; else PACELINE_OVERLAP, else backward
    reproducible        the final weights are the same bits for any number of nodes, and whatever nodes are lost, on
                        like processors: the batch is computed in 8 shares, or as many as given, whose gradients are
                        added up in a fixed order; as engine="reproducible:8", exchange="ordered"
    encrypt             everything between nodes is encrypted, by TLS 1.3; else PACELINE_ENCRYPT, which --encrypt sets

    All nodes start from rank 0's weights. With a folder, Ctrl-C and SIGTERM end the step, save, and exit. Raises
    ValueError for wrong arguments, LinkError when the others cannot be reached.
    """
    configure()
    asked = _Asked(engine, exchange, codec, shares, overlap, keep, reproducible, encrypt, folder)
    joined = [each.job.model for each in _here if not each.training.over and not each.training.broken]
    found = join_arguments.faults(model, optimizer, asked.words, joined)
    size = batch_size * stopwatch.times() if isinstance(batch_size, int) else batch_size
    dealt = "measured" if found else load_balance.wanted(asked.words["shares"])
    job_of = partial(Job, batch_norm=batch_norm, forward=forward, most_rows=most_rows, buffers=buffers, found=found)
    inside, how = wrapped_models.inside(model), (metric, accumulate, precision, scheduler)
    job = job_of(inside, optimizer, loss, size, clip, seed, *how, shares=dealt)
    # of a comparison: a rank that a process alone is told
    world = LaunchEnvironment() if equivalence.asked().get("told") else LaunchEnvironment.of_environment()
    return _train(asked, job, world, model)


@dataclass(frozen=True)
class _Asked:
    """What `join` was given that says how nodes compute and agree, and where they write."""

    engine: str | None
    exchange: str
    codec: str
    shares: str | Sequence[float] | None
    overlap: str | None
    keep: int
    reproducible: bool | int
    encrypt: bool | None
    folder: str | os.PathLike[str] | None

    @property
    def words(self) -> dict[str, Any]:
        """By their names; the default of shares is the environment's."""
        shares = os.environ.get("PACELINE_SHARES", "measured") if self.shares is None else self.shares
        return {**vars(self), "shares": shares}


@dataclass(frozen=True)
class _Parts:
    """``row``: of the engine and its numerics. ``exchange_name``: with its options."""

    row: str
    engine: Engine
    exchange: Exchange
    codec: Codec
    exchange_name: str


def _train(asked: _Asked, job: Job, world: LaunchEnvironment, given: torch.nn.Module) -> Pace:
    """Parts, a link between the nodes, and the training that they make. ``given``: the model, wrapped as it was."""
    hidden = _encrypted(asked.encrypt)
    secret_of_environment()  # what this process starts from now on need not know it
    row = _row(asked, world, job)
    sys.excepthook = _one_line(sys.excepthook)
    affinity.keep()
    if collective := os.environ.get("PACELINE_COLLECTIVE", ""):
        Collective(collective)  # an unknown name is refused before the others are called
    parts = _parts(asked, row, world, job)
    members, late = _linked(world, job.model, hidden, collective)
    wrappers = wrapped_models.Wrappers(given)
    try:
        made = parts.engine, parts.exchange, parts.codec
        training = Training(job, *made, members, world, _folder(asked.folder), asked.keep, late)
    except BaseException:
        wrappers.restore()
        raise
    pace = Pace(training)
    pace.run.row, training.wrappers = row, wrappers
    if wrappers.found and pace.leader:
        log.info(wrappers.notice)
        pace.record.write("hint", text=wrappers.notice)
    _here[:] = [*(each for each in _here if not each.training.over), pace]
    _record(pace, parts, asked.codec, job.batch_size, bool(members and hidden))
    training.announce_met()
    training.home.measure()
    auto_resume.enlist(pace, bool(world.join_ticket))
    if not world.join_ticket:
        process_status.report(joined=True)
    atexit.register(lambda: process_status.report(step=pace.num_steps))  # of a script that ends by an exit code alone
    return pace


def _row(asked: _Asked, world: LaunchEnvironment, job: Job) -> str:
    """How this node computes: as `join` says, else the environment, else what fits; made reproducible where asked."""
    row = asked.engine or os.environ.get("PACELINE_ENGINE")
    row = registry.current("engine", row or (registry.REPRODUCIBLE if asked.reproducible else _default_row(world, job)))
    if not asked.reproducible:
        return row
    engine, *words = row.split("+")
    if asked.reproducible is not True or not registry.says("engine", registry.head(engine)[0], "reproduces"):
        engine = f"{registry.REPRODUCIBLE}:{registry.SHARES if asked.reproducible is True else asked.reproducible}"
    return "+".join([engine, *words])


def _parts(asked: _Asked, row: str, world: LaunchEnvironment, job: Job) -> _Parts:
    """Raises ValueError for what does not go together."""
    name, numerics = parse_row(row)
    engine, exchange = registry.parse("engine", name), registry.current("exchange", asked.exchange)
    if engine.reproduces and exchange == registry.EXCHANGE:
        exchange = registry.FIXED_ORDER
    parts = _Parts(row, engine, registry.parse("exchange", exchange), registry.parse("codec", asked.codec), exchange)
    engine.seed, engine.accumulate = job.seed, job.accumulate
    engine.numerics = dataclasses.replace(numerics, precision=job.precision) if job.precision else numerics
    if job.forward:
        engine.call_model = job.forward
    parts.exchange.overlap = overlaps.choose(asked.overlap, job, row, engine, parts.exchange)
    precision, shares = engine.numerics.precision, engine.num_virtual_shards
    if against := join_arguments.clashes(
        world, name, precision, parts.exchange, exchange, asked.codec, job.buffers, shares, job.batch_norm
    ):
        raise ValueError(f"join: {'; '.join(against)}")
    return parts


def _linked(
    world: LaunchEnvironment, model: torch.nn.Module, hidden: bool, collective: str
) -> tuple[Members | None, JoiningLink | None]:
    """The nodes of the run, where there are several and this process is its node's first; of a late one, as which."""
    if world.join_ticket and world.local_rank == 0:
        from paceline.elastic.joiner import JoiningLink  # which only some need

        if not registry.says("link", kind := _link(world, model, hidden), "admits"):
            raise ValueError(
                f"no node joins late over {kind.upper()}, which PACELINE_LINK asks for; start the run again"
            )
        made = registry.module("link", kind).Link
        late = JoiningLink(Path(world.join_ticket), os.environ.get("PACELINE_NODE", ""), made)
        return joining(late.activity, collective, late.join), late
    if world.join_ticket or world.num_nodes == 1:
        return None, None
    if not registry.says("link", kind := _link(world, model, hidden), "finds_others") and not world.host:
        raise ValueError(
            f"mpirun started {world.world_size} processes on several nodes and does not say where rank 0 runs; add -x "
            f"MASTER_ADDR=HOST to mpirun, the name by which the others know the first host; or start one process "
            f"per node (--map-by ppr:1:node) with paceline[mpi] installed, where MPI itself knows the way"
        )
    if world.local_rank:
        return None, None
    return connect(kind, world.node, world.num_nodes, world.host, world.port, next(_joins), collective), None


def _record(pace: Pace, parts: _Parts, codec: str, batch_size: int, encrypted: bool) -> None:
    """The plan that the run follows, if any, and how it has joined."""
    planned = os.environ.pop("PACELINE_PLAN", "")
    if pace.record.folder and (planned or (pace.record.folder / "plan.toml").exists()):
        from paceline.planner.planner import Plan

        if planned:
            Plan.from_toml(planned, "PACELINE_PLAN").write(pace.record.folder / "plan.toml")
        pace.record.write("plan", **Plan.read(pace.record.folder / "plan.toml").to_dict())
    pace.record.write(
        "join",
        engine=parts.row,
        exchange=parts.exchange_name,
        codec=codec,
        num_nodes=pace.world.num_nodes,
        batch_size=batch_size,
        shares=pace.shares,
        **({"encrypted": True} if encrypted else {}),
        **({"overlap": parts.exchange.overlap} if parts.exchange.overlap != "backward" else {}),
        **({"emulated": True} if parts.engine.fidelity == "emulated" else {}),
    )


def _encrypted(asked: bool | None) -> bool:
    given = os.environ.get("PACELINE_ENCRYPT", "")
    if given not in ("", "0", "1"):
        raise ValueError(f"PACELINE_ENCRYPT={given!r} is neither 1 nor 0; set it to one of these, or unset it")
    return given == "1" if asked is None else asked


def _link(world: LaunchEnvironment, model: torch.nn.Module, hidden: bool = False) -> str:
    """PACELINE_LINK, else one that encrypts where that is asked for, else one whose own launcher started one process
    per node and that carries what the model lies on, else the default."""
    given = registry.current("link", os.environ.get("PACELINE_LINK", ""))
    if hidden:
        encrypted = registry.ENCRYPTED
        if given and not registry.says("link", given, "hides"):
            raise ValueError(f"PACELINE_LINK={given!r} does not encrypt, as asked for; unset it, or use {encrypted}")
        return given or encrypted
    known = [name for name in registry.names("link") if registry.says("link", name, "networked")]
    if given:
        if given not in known:
            raise ValueError(f"PACELINE_LINK={given!r} is no link between nodes; use {', '.join(known)}, or unset it")
        return given
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return next((name for name in known if _suits(name, world, on_cpu)), registry.LINK)


def _suits(link: str, world: LaunchEnvironment, on_cpu: bool) -> bool:
    """Whether its own launcher has started the nodes, and it can carry what they have to say."""
    started = tuple(os.environ.get(variable) for variable in registry.says("link", link, "started_by"))
    possible = on_cpu or not registry.says("link", link, "on_cpu")
    package = registry.says("link", link, "package")[0]
    here = not package or importlib.util.find_spec(package) is not None
    return started == (str(world.node), str(world.num_nodes)) and possible and here


def _default_row(world: LaunchEnvironment, job: Job) -> str:
    """Where no engine is given: as planned for this job, else threads; a log line says which."""
    cores = survey().cores
    if world.local_size > 1:
        return f"{registry.PROCESSES}:{world.local_size}"
    plain = f"{registry.THREADS}:{cores}"
    if cores == 1:
        return plain
    made = plan_cache.of_job(job, "exact", sys.argv)
    if made is None and world.num_nodes > 1:
        return plain
    if made is None:
        row, hint = plain, "not measured; `paceline run SCRIPT` measures and may be faster"
    elif not _starts_processes(made.chosen):
        row, hint = made.chosen, f"as measured {made.date}"
    else:
        here = [r for r in made.rows if r.measured_s and r.fidelity == "exact" and not _starts_processes(r.engine)]
        row = min(here, key=lambda r: r.measured_s or 0.0).engine if here else plain
        hint = f"the fastest in one process; `paceline run SCRIPT` starts the faster {made.chosen}"
    log.info(f"{row}, {hint}")
    return row


def _starts_processes(row: str) -> bool:
    return bool(registry.says("engine", registry.head(row)[0], "starts_processes"))


def _folder(given: str | os.PathLike[str] | None) -> Path | None:
    """The run's; of a script that trains two models at once, the second has one below the first's."""
    if given or not (kept := os.environ.get("PACELINE_FOLDER")):
        return Path(given) if given else None
    taken = {pace.folder for pace in _here if not pace.training.over}
    paths = itertools.chain([Path(kept)], (Path(kept) / str(n) for n in itertools.count(2)))
    return next(path for path in paths if path not in taken)


def _one_line(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A broken link is not a bug in the script: one line says it, without a traceback."""
    if getattr(hook, "paceline", False):
        return hook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show.failed = True  # type: ignore[attr-defined]
        process_status.failed(error, max((pace.num_steps for pace in _here), default=0), isinstance(error, LinkError))
        if getattr(error, "reported", False):
            return  # another process of this run prints the same text
        if isinstance(error, LinkError) and error.resumes:
            log.error(f"{error}; exit code {RESUME_CODE}: resume from the newest checkpoint")
            sys.exit(RESUME_CODE)  # which Python heeds here
        if isinstance(error, LinkError | NeverStepped | NotFinite | NoGradient | UnlikeOptions | CheckpointError):
            log.error(str(error))
        elif hook is sys.__excepthook__:
            sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
        else:
            hook(kind, error, trace)

    show.paceline = True  # type: ignore[attr-defined]
    return show
