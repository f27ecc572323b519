"""`join`: builds one training session from a job, an engine, a link, a codec and an exchange."""

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
from paceline.engine.node.several_optimizers import as_one
from paceline.environment import LaunchEnvironment
from paceline.errors import CheckpointError, LinkError, NeverStepped, NoGradient, NotFinite, UnlikeOptions
from paceline.job import Job
from paceline.launch.machine import memory_bytes, survey
from paceline.launch.signals import RESUME_CODE
from paceline.link.net.auth import secret_of_environment
from paceline.link.net.collective_run import Collective
from paceline.pace import Pace
from paceline.planner import plan_cache
from paceline.planner.diagnose import equivalence
from paceline.planner.measure import stopwatch
from paceline.report import process_status
from paceline.report.log import configure, log
from paceline.step import several_schedulers
from paceline.step.like_torch import hint_for
from paceline.training import Training

TEMPORARIES = 5  # tensors of all gradients that a codec with a residual has at once

if TYPE_CHECKING:
    from paceline.elastic.joiner import JoiningLink

_joined: list[Pace] = []  # the sessions of this process that have not ended
_joins = itertools.count()  # every process joins in the same order, so each join is a separate rendezvous


def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
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
    engine: str | Engine | None = None,
    exchange: str | Exchange = registry.EXCHANGE,
    codec: str | Codec = registry.CODEC,
    folder: str | os.PathLike[str] | None = None,
    keep: int = 2,
    shares: str | Sequence[float] | None = None,
    most_rows: int | None = None,
    overlap: str | None = None,
    reproducible: bool | int = False,
    encrypt: bool | None = None,
) -> Pace:
    """Joins this process to a training, as its only process or as one of many that run the same script.

    model, optimizer    remain yours: any nn.Module, any torch.optim optimizer but LBFGS, or a list of several; of a
                        model in DistributedDataParallel or DataParallel the module inside is trained
    loss                ``loss(output, target)``: a mean over samples, a (sum, weight), or a dict of means; None: the
                        output's own ``.loss``. A parameter named ``batch`` receives the whole batch
    batch_size          global: over all processes and nodes
    clip                the maximum global norm of gradients
    accumulate          micro-batches in which a process computes its share, to save memory
    precision           "fp32", "bf16", "fp16" (with loss scaling); None: that of the plan
    scheduler           a torch.optim.lr_scheduler, stepped once per applied step, or a list of several
    batch_norm          "local": each process's own statistics, as DDP; "sync": those of the global batch
    buffers             that forward changes from a process's samples, such as a codebook: "own": each process keeps
                        its own, and rank 0's are saved; "broadcast": rank 0's everywhere after each step, as DDP
    seed                of the order of samples, and of each process's random state
    metric              ``metric(output, target)``, a sum over samples, for `evaluate` and the event log
    forward             ``forward(model, batch)``, where model(*batch[:-1]) or model(**batch) is not the call
    engine              the node's parallelism; else PACELINE_ENGINE, else this job's cached plan, else threads
    exchange, codec     gradient synchronisation and gradient compression. These three are names with options, such as
                        "feedback/topk:keep=0.01"; "package.module:Class" of your own; or objects
    folder, keep        the run's folder (event log, checkpoints; else PACELINE_FOLDER), and how many checkpoints stay

    shares              of the global batch on several nodes: "measured": by each node's speed, adapted when it
                        changes; "equal"; or proportional numbers, one per node; else PACELINE_SHARES, else measured
    most_rows           the maximum samples of the global batch for this node, to limit memory
    overlap             "backward": a step ends with its update; "forward": gradients arrive, and are applied, while the
                        next step's forward pass runs, for slow networks; else PACELINE_OVERLAP, else backward
    reproducible        the final weights are bit-equal for any number of nodes, also if nodes fail, on processors of
                        the same kind: the batch is divided into 8 virtual shards, or the given number, whose gradients
                        are added in a fixed order; same as engine="reproducible:8", exchange="ordered"
    encrypt             encrypts all traffic between nodes by TLS 1.3; else PACELINE_ENCRYPT, which --encrypt sets

    All nodes start from rank 0's weights. With a folder, Ctrl-C and SIGTERM end the step, save, and exit. Raises
    ValueError for wrong arguments, LinkError when other nodes cannot be reached.
    """
    configure()
    one: Any = as_one(optimizer)
    request = _Request(engine, exchange, codec, shares, overlap, keep, reproducible, encrypt, folder)
    joined = [pace.job.model for pace in _joined if not pace.training.over and not pace.training.broken]
    found = join_arguments.faults(model, one, request.arguments, joined)
    size = batch_size * stopwatch.times() if isinstance(batch_size, int) else batch_size
    shares = "measured" if found else load_balance.parse_shares(request.arguments["shares"])
    job_of = partial(Job, batch_norm=batch_norm, forward=forward, most_rows=most_rows, buffers=buffers, found=found)
    options = metric, accumulate, precision, several_schedulers.as_one(scheduler)
    inside = wrapped_models.inside(model)
    job = job_of(inside, one, loss, size, clip, seed, *options, shares=shares)
    # in an equivalence run, a single process may be given a rank
    world = LaunchEnvironment() if equivalence.requested().get("told") else LaunchEnvironment.of_environment()
    return _train(request, job, world, model)


@dataclass(frozen=True)
class _Request:
    """The arguments of `join` that determine parallelism, communication and the run's folder."""

    engine: str | Engine | None
    exchange: str | Exchange
    codec: str | Codec
    shares: str | Sequence[float] | None
    overlap: str | None
    keep: int
    reproducible: bool | int
    encrypt: bool | None
    folder: str | os.PathLike[str] | None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name; the default of shares is from the environment."""
        shares = os.environ.get("PACELINE_SHARES", "measured") if self.shares is None else self.shares
        return {**vars(self), "shares": shares}


@dataclass(frozen=True)
class _Parts:
    """``row``: the engine and its numerics, as in a plan. ``exchange_name``, ``codec_name``: with their options."""

    row: str
    engine: Engine
    exchange: Exchange
    codec: Codec
    exchange_name: str
    codec_name: str


def _train(request: _Request, job: Job, world: LaunchEnvironment, given: torch.nn.Module) -> Pace:
    """Builds the parts, the link between the nodes, and the training. ``given``: the model, possibly in a wrapper."""
    encrypted = _encrypted(request.encrypt)
    secret_of_environment()  # removes the secret from the environment of child processes
    row = _row(request, world, job)
    sys.excepthook = _one_line(sys.excepthook)
    if collective := os.environ.get("PACELINE_COLLECTIVE", ""):
        Collective(collective)  # raises an error for an unknown name before the rendezvous
    parts = _parts(request, row, world, job)
    affinity.keep(_temporary_bytes(job.model, parts.codec))
    members, joining_link = _linked(world, job.model, encrypted, collective)
    wrappers = wrapped_models.Wrappers(given)
    try:
        made = parts.engine, parts.exchange, parts.codec
        training = Training(job, *made, members, world, _folder(request.folder), request.keep, joining_link)
    except BaseException:
        wrappers.restore()
        raise
    pace = Pace(training)
    pace.run.row, training.wrappers = row, wrappers
    pace.run.asked = parts.exchange_name, parts.codec_name
    if wrappers.found and pace.leader:
        log.info(wrappers.notice)
        pace.record.write("hint", text=wrappers.notice)
    _joined[:] = [*(pace for pace in _joined if not pace.training.over), pace]
    _record(pace, parts, job.batch_size, bool(members and encrypted))
    training.announce_met()
    training.run_folder.measure()
    auto_resume.register(pace, bool(world.join_ticket))
    if not world.join_ticket:
        process_status.report(joined=True)
    atexit.register(lambda: process_status.report(step=pace.num_steps))  # also if the script ends by sys.exit
    return pace


def _row(request: _Request, world: LaunchEnvironment, job: Job) -> str:
    """The node's configuration: `join`'s argument, else the environment's, else the default; reproducible if asked."""
    if isinstance(request.engine, Engine):
        return registry.made("engine", request.engine)[0]
    row = request.engine or os.environ.get("PACELINE_ENGINE")
    row = row or (registry.REPRODUCIBLE if request.reproducible else _default_row(world, job))
    row = registry.current("engine", row)
    if not request.reproducible:
        return row
    engine, *options = row.split("+")
    if request.reproducible is not True or not registry.says("engine", registry.head(engine)[0], "reproduces"):
        engine = f"{registry.REPRODUCIBLE}:{registry.SHARES if request.reproducible is True else request.reproducible}"
    return "+".join([engine, *options])


def _parts(request: _Request, row: str, world: LaunchEnvironment, job: Job) -> _Parts:
    """Raises ValueError for incompatible arguments."""
    name, numerics = parse_row(row)
    own = isinstance(request.engine, Engine)
    engine: Any = request.engine if own else registry.parse("engine", name)
    ordered = engine.reproduces and request.exchange == registry.EXCHANGE
    exchange, synchronises = registry.made("exchange", registry.FIXED_ORDER if ordered else request.exchange)
    codec, encodes = registry.made("codec", request.codec)
    parts = _Parts(row, engine, synchronises, encodes, exchange, codec)
    engine.seed, engine.accumulate = job.seed, job.accumulate
    engine.bucket_bytes = parts.codec.bucket_bytes, 0 if parts.exchange.factors else parts.codec.bucket_bytes
    if job.precision or not own:  # an object has its own
        engine.numerics = dataclasses.replace(numerics, precision=job.precision) if job.precision else numerics
    if job.forward:
        engine.call_model = job.forward
    parts.exchange.overlap = overlaps.choose(request.overlap, job, row, engine, parts.exchange)
    precision, shares = engine.precision, engine.num_virtual_shards
    against = join_arguments.clashes(
        world, name, precision, parts.exchange, exchange, codec, encodes, job.buffers, shares, job.batch_norm
    )
    if job.precision and precision != job.precision:
        against.append(f"engine {name!r} computes in {precision}, and not in {job.precision}; leave precision out")
    if against:
        raise ValueError(f"join: {'; '.join(against)}")
    return parts


def _temporary_bytes(model: torch.nn.Module, codec: Codec) -> int:
    """Of what a codec with a residual makes of all gradients in a step, and frees; a part of this machine's memory."""
    gradients = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    return min(TEMPORARIES * gradients, memory_bytes() // 8) if codec.has_residual else 0


def _linked(
    world: LaunchEnvironment, model: torch.nn.Module, encrypted: bool, collective: str
) -> tuple[Members | None, JoiningLink | None]:
    """The members of the run, in the first process of each of several nodes; on a joining node also its link."""
    if world.join_ticket and world.local_rank == 0:
        from paceline.elastic.joiner import JoiningLink  # needed only here

        if not registry.says("link", kind := _link(world, model, encrypted), "admits"):
            raise ValueError(
                f"PACELINE_LINK selects {kind.upper()}, over which no node can join later; start the run again"
            )
        made = registry.module("link", kind).Link
        joining_link = JoiningLink(Path(world.join_ticket), os.environ.get("PACELINE_NODE", ""), made)
        return joining(joining_link.activity, collective, joining_link.join), joining_link
    if world.join_ticket or world.num_nodes == 1:
        return None, None
    if not registry.says("link", kind := _link(world, model, encrypted), "finds_others") and not world.host:
        raise ValueError(
            f"mpirun started {world.world_size} processes on several nodes and does not say where rank 0 runs; add -x "
            f"MASTER_ADDR=HOST to mpirun, the name by which the others know the first host; or start one process "
            f"per node (--map-by ppr:1:node) with paceline[mpi] installed, where MPI itself knows the addresses"
        )
    if world.local_rank:
        return None, None
    return connect(kind, world.node, world.num_nodes, world.host, world.port, next(_joins), collective), None


def _record(pace: Pace, parts: _Parts, batch_size: int, encrypted: bool) -> None:
    """Logs the run's plan, if any, and the arguments of the join."""
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
        codec=parts.codec_name,
        num_nodes=pace.world.num_nodes,
        batch_size=batch_size,
        shares=pace.shares,
        **({"encrypted": True} if encrypted else {}),
        **({"overlap": parts.exchange.overlap} if parts.exchange.overlap != "backward" else {}),
        **({"emulated": True} if parts.engine.fidelity == "emulated" else {}),
    )


def _encrypted(argument: bool | None) -> bool:
    given = os.environ.get("PACELINE_ENCRYPT", "")
    if given not in ("", "0", "1"):
        raise ValueError(f"PACELINE_ENCRYPT={given!r} is neither 1 nor 0; set it to one of these, or unset it")
    return given == "1" if argument is None else argument


def _link(world: LaunchEnvironment, model: torch.nn.Module, encrypted: bool = False) -> str:
    """PACELINE_LINK, else the encrypting link if encryption is requested, else a link whose own launcher started one
    process per node and that supports the model's device, else the default."""
    given = registry.current("link", os.environ.get("PACELINE_LINK", ""))
    if encrypted:
        default = registry.ENCRYPTED
        if given and not registry.says("link", given, "hides"):
            raise ValueError(f"PACELINE_LINK={given!r} does not encrypt, as requested; unset it, or use {default}")
        return given or default
    known = [name for name in registry.names("link") if registry.says("link", name, "networked")]
    if given:
        if given not in known:
            raise ValueError(f"PACELINE_LINK={given!r} is no link between nodes; use {', '.join(known)}, or unset it")
        return given
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return next((name for name in known if _suits(name, world, on_cpu)), registry.LINK)


def _suits(link: str, world: LaunchEnvironment, on_cpu: bool) -> bool:
    """Whether the link's own launcher has started the nodes, its package is installed, and it supports the device."""
    started = tuple(os.environ.get(variable) for variable in registry.says("link", link, "started_by"))
    possible = on_cpu or not registry.says("link", link, "on_cpu")
    package = registry.says("link", link, "package")[0]
    available = not package or importlib.util.find_spec(package) is not None
    return started == (str(world.node), str(world.num_nodes)) and possible and available


def _default_row(world: LaunchEnvironment, job: Job) -> str:
    """The configuration where no engine is given: that of this job's cached plan, else threads. It is logged."""
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
        available = [r for r in made.rows if r.measured_s and r.fidelity == "exact" and not _starts_processes(r.engine)]
        row = min(available, key=lambda r: r.measured_s or 0.0).engine if available else plain
        hint = f"the fastest in one process; `paceline run SCRIPT` starts the faster {made.chosen}"
    log.info(f"{row}, {hint}")
    return row


def _starts_processes(row: str) -> bool:
    return bool(registry.says("engine", registry.head(row)[0], "starts_processes"))


def _folder(given: str | os.PathLike[str] | None) -> Path | None:
    """The run's folder; if a script trains two models at once, the second one has a folder inside the first's."""
    if given or not (parent := os.environ.get("PACELINE_FOLDER")):
        return Path(given) if given else None
    used = {pace.folder for pace in _joined if not pace.training.over}
    paths = itertools.chain([Path(parent)], (Path(parent) / str(n) for n in itertools.count(2)))
    return next(path for path in paths if path not in used)


def _one_line(hook: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook that logs the errors of a training in one line, without a traceback, as they are no script bugs."""
    if getattr(hook, "paceline", False):
        return hook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show.failed = True  # type: ignore[attr-defined]
        process_status.failed(error, max((pace.num_steps for pace in _joined), default=0), isinstance(error, LinkError))
        if getattr(error, "reported", False):
            return  # another process of this run logs the same text
        if isinstance(error, LinkError) and error.resumes:
            log.error(f"{error}; exit code {RESUME_CODE}: resume from the newest checkpoint")
            sys.exit(RESUME_CODE)  # sets the exit code even in an excepthook
        if isinstance(error, LinkError | NeverStepped | NotFinite | NoGradient | UnlikeOptions | CheckpointError):
            log.error(str(error))
        elif hook is sys.__excepthook__:
            sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
        else:
            hook(kind, error, trace)
        if text := hint_for(error, [pace.job.model for pace in _joined]):
            log.error(text)

    show.paceline = True  # type: ignore[attr-defined]
    return show
