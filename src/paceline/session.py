"""The only place where the axes meet: a job, an engine, a link, a codec and an exchange become one loop."""

from __future__ import annotations

import atexit
import dataclasses
import importlib.util
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from paceline.checkpoint import auto_resume
from paceline.data import load_balance
from paceline.elastic.membership import Members, connect
from paceline.engine.checks import join_arguments, wrapped_models
from paceline.engine.compute import deferred_update as overlaps
from paceline.engine.compute.precision import parse_row
from paceline.engine.node import affinity
from paceline.environment import World
from paceline.errors import CheckpointError, LinkError, NeverStepped, NoGradient, NotFinite, UnlikeOptions
from paceline.job import Job
from paceline.launch.machine import survey
from paceline.launch.signals import RESUME_CODE
from paceline.launch.supervise import process_status
from paceline.link import memory
from paceline.link.net.auth import secret_of_environment
from paceline.link.net.collective_run import Collective
from paceline.pace import Pace
from paceline.planner import plan_cache
from paceline.planner.diagnose import equivalence
from paceline.planner.measure import stopwatch
from paceline.registry import current, find, parse
from paceline.registry import module as find_module
from paceline.report.log import configure, log
from paceline.training import Training

_here: list[Pace] = []  # that this process has joined, and not left
_joins = itertools.count()  # every process joins in the same order, so each join is a meeting of its own
LINKS = "gloo", "mpi", "nccl", "tls"


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
    exchange: str = "allreduce",
    codec: str = "none",
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
    if shares is None:
        shares = os.environ.get("PACELINE_SHARES", "measured")
    words: dict[str, Any] = {
        "engine": engine,
        "exchange": exchange,
        "codec": codec,
        "shares": shares,
        "overlap": overlap,
        "keep": keep,
    }
    words |= {"reproducible": reproducible, "encrypt": encrypt, "folder": folder}
    joined = [each.job.model for each in _here if not each.training.over and not each.training.broken]
    found = join_arguments.faults(model, optimizer, words, joined)
    given, model = model, wrapped_models.inside(model)
    job = Job(
        model,
        optimizer,
        loss,
        batch_size * stopwatch.times() if isinstance(batch_size, int) else batch_size,
        clip,
        seed,
        metric,
        accumulate,
        precision,
        scheduler,
        batch_norm,
        forward,
        "measured" if found else load_balance.wanted(shares),
        most_rows,
        buffers,
        found,
    )
    batch_size = job.batch_size
    told = equivalence.asked().get("told")  # of a comparison: a rank that a process alone is told
    world = World() if told else World.of_environment()
    hidden = _encrypted(encrypt)
    secret_of_environment()  # what this process starts from now on need not know it
    row = engine or os.environ.get("PACELINE_ENGINE") or ("reproducible" if reproducible else _default_row(world, job))
    row, exchange = current("engine", row), current("exchange", exchange)
    if reproducible:
        row = _reproducible(row, reproducible)
    chosen, numerics = parse_row(row)
    sys.excepthook = _one_line(sys.excepthook)
    affinity.keep()
    if adding := os.environ.get("PACELINE_COLLECTIVE", ""):
        Collective(adding)  # a name that is not known is told before the others are called
    members: Members | None = None
    parts = parse("engine", chosen), parse("exchange", exchange), parse("codec", codec)
    if parts[0].num_shares and exchange == "allreduce":
        exchange, parts = "ordered", (parts[0], find("exchange", "ordered"), parts[2])
    parts[0].seed = seed
    parts[0].numerics = dataclasses.replace(numerics, precision=precision) if precision else numerics
    parts[0].accumulate = accumulate
    if forward:
        parts[0].forward = forward
    parts[1].overlap = overlaps.choose(overlap, job, row, parts[0], parts[1])
    if against := join_arguments.clashes(
        world, chosen, parts[0].numerics.precision, parts[1], exchange, codec, buffers, parts[0].num_shares
    ):
        raise ValueError(f"join: {'; '.join(against)}")
    late: Late | None = None
    if world.late and world.local_rank == 0:
        from paceline.elastic.joiner import Late  # which only some need

        if (kind := _link(world, model, hidden)) == "mpi":
            raise ValueError("nobody comes late over MPI, which PACELINE_LINK asks for; start the run again")
        late = Late(Path(world.late), os.environ.get("PACELINE_NODE", ""), find_module("link", kind).Link)
        members = Members(memory.world(1)[0], late.activity, adding, late.join)
    elif world.num_nodes > 1:
        if (kind := _link(world, model, hidden)) != "mpi" and not world.host:
            raise ValueError(
                f"mpirun started {world.size} processes on several nodes and does not say where rank 0 runs; add -x "
                f"MASTER_ADDR=HOST to mpirun, the name by which the others know the first host; or start one process "
                f"per node (--map-by ppr:1:node) with paceline[mpi] installed, where MPI itself knows the way"
            )
        if world.local_rank == 0:
            members = connect(kind, world.node, world.num_nodes, world.host, world.port, next(_joins), adding)
    wrappers = wrapped_models.Wrappers(given)
    try:
        training = Training(job, *parts, members, world, _folder(folder), keep, late)
    except BaseException:
        wrappers.restore()
        raise
    pace = Pace(training)
    pace.run.row, training.wrappers = row, wrappers
    if wrappers.found and pace.leader:
        log.info(wrappers.words)
        pace.record.write("hint", text=wrappers.words)
    _here[:] = [*(each for each in _here if not each.training.over), pace]
    planned = os.environ.pop("PACELINE_PLAN", "")
    if pace.record.folder and (planned or (pace.record.folder / "plan.toml").exists()):
        from paceline.planner.planner import Plan

        if planned:
            Plan.from_toml(planned, "PACELINE_PLAN").write(pace.record.folder / "plan.toml")
        pace.record.write("plan", **Plan.read(pace.record.folder / "plan.toml").to_dict())
    pace.record.write(
        "join",
        engine=row,
        exchange=exchange,
        codec=codec,
        num_nodes=pace.world.num_nodes,
        batch_size=batch_size,
        shares=pace.shares,
        **({"encrypted": True} if members and hidden else {}),
        **({"overlap": parts[1].overlap} if parts[1].overlap != "backward" else {}),
        **({"emulated": True} if parts[0].fidelity == "emulated" else {}),
    )
    training.announce_met()
    training.home.measure()
    auto_resume.enlist(pace, bool(world.late))
    if not world.late:
        process_status.report(joined=True)
    atexit.register(lambda: process_status.report(step=pace.num_steps))  # of a script that ends by an exit code alone
    return pace


def _reproducible(row: str, asked: bool | int) -> str:
    """The row with engine "reproducible" in place of its own."""
    engine, *words = row.split("+")
    if engine.partition(":")[0] != "reproducible" or asked is not True:
        engine = f"reproducible:{8 if asked is True else asked}"
    return "+".join([engine, *words])


def _encrypted(asked: bool | None) -> bool:
    said = os.environ.get("PACELINE_ENCRYPT", "")
    if said not in ("", "0", "1"):
        raise ValueError(f"PACELINE_ENCRYPT={said!r} is neither 1 nor 0; set it to one of these, or unset it")
    return said == "1" if asked is None else asked


def _link(world: World, model: torch.nn.Module, hidden: bool = False) -> str:
    """PACELINE_LINK, else "tls" where all is encrypted, else "mpi" where mpirun started one process per node and a
    model on the CPU, else "gloo"."""
    said = current("link", os.environ.get("PACELINE_LINK", ""))
    if hidden:
        if said not in ("", "tls"):
            raise ValueError(f"PACELINE_LINK={said!r} does not encrypt, as asked for; unset it, or use tls")
        return "tls"
    if said:
        if said not in LINKS:
            raise ValueError(f"PACELINE_LINK={said!r} is no link between nodes; use {', '.join(LINKS)}, or unset it")
        return said
    started = os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("OMPI_COMM_WORLD_SIZE")
    possible = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if started == (str(world.node), str(world.num_nodes)) and possible and importlib.util.find_spec("mpi4py"):
        return "mpi"
    return "gloo"


def _default_row(world: World, job: Job) -> str:
    """Nobody has said how to compute: as planned for this job, else threads. One line says so."""
    cores = survey().cores
    if world.local_size > 1:
        return f"processes:{world.local_size}"
    if cores == 1:
        return f"threads:{cores}"
    made = plan_cache.of_job(job, "exact", sys.argv)
    if made is None and world.num_nodes > 1:
        return f"threads:{cores}"
    if made is None:
        row, hint = f"threads:{cores}", "not measured; `paceline run SCRIPT` measures and may be faster"
    elif not made.chosen.startswith("processes"):
        row, hint = made.chosen, f"as measured {made.date}"
    else:
        here = [r for r in made.rows if r.measured_s and r.fidelity == "exact" and not r.engine.startswith("processes")]
        row = min(here, key=lambda r: r.measured_s or 0.0).engine if here else f"threads:{cores}"
        hint = f"the fastest in one process; `paceline run SCRIPT` starts the faster {made.chosen}"
    log.info(f"{row}, {hint}")
    return row


def _folder(given: str | os.PathLike[str] | None) -> Path | None:
    """The run's; of a script that trains two models at once, the second has one below the first's."""
    if given or not (said := os.environ.get("PACELINE_FOLDER")):
        return Path(given) if given else None
    taken = {pace.folder for pace in _here if not pace.training.over}
    own = itertools.chain([Path(said)], (Path(said) / str(n) for n in itertools.count(2)))
    return next(path for path in own if path not in taken)


def _one_line(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A broken link is not a bug in the script: one line says it, without a traceback."""
    if getattr(hook, "paceline", False):
        return hook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show.failed = True  # type: ignore[attr-defined]
        process_status.failed(error, max((pace.num_steps for pace in _here), default=0), isinstance(error, LinkError))
        if getattr(error, "told", False):
            return  # another process of this run prints the same words
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
