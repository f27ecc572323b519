"""The only place where the axes meet: a job, an engine, a link, a codec and an exchange become one loop."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline import contract
from paceline.contract import LinkError
from paceline.data import feed
from paceline.data.order import Seat
from paceline.find import find, parse
from paceline.job import Job
from paceline.loop import Loop
from paceline.probe import examine, layers, shelf
from paceline.probe.clock import Stopwatch
from paceline.probe.witness import Witness
from paceline.report.record import Record

_joins = itertools.count()  # every process joins in the same order, so each join is a meeting of its own


@dataclass(frozen=True)
class World:
    """Who this process is, as launchers say it: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK."""

    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    num_nodes: int = 1
    host: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def of_environment(cls) -> World:
        def number(name: str, default: int) -> int:
            text = os.environ.get(name, str(default))
            if not text.isdigit():
                raise ValueError(
                    f"{name}={text!r} in the environment must be a whole number; unset it or mend the launcher"
                )
            return int(text)

        size, local_size = number("WORLD_SIZE", 1), number("LOCAL_WORLD_SIZE", 1)
        rank, per_node = number("RANK", 0), max(1, local_size)
        node, local_rank = number("GROUP_RANK", rank // per_node), number("LOCAL_RANK", rank % per_node)
        given = (
            f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}, GROUP_RANK={node}"
        )
        if size % per_node or not (
            local_size and rank < size and local_rank < local_size and node < size // local_size
        ):
            raise ValueError(
                f"{given} do not fit together: every node needs the same number of processes, RANK must be below "
                f"WORLD_SIZE, LOCAL_RANK below LOCAL_WORLD_SIZE, and GROUP_RANK below the number of nodes"
            )
        if size > local_size and not os.environ.get("MASTER_PORT"):
            raise ValueError(
                "WORLD_SIZE asks for several nodes, but MASTER_ADDR and MASTER_PORT do not say where to meet"
            )
        return cls(
            local_rank,
            local_size,
            node,
            size // local_size,
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            number("MASTER_PORT", 0),
        )


class Pace:
    """A model being trained by one or many. Made by `join`."""

    def __init__(
        self,
        job: Job,
        engine: contract.Engine,
        exchange: contract.Exchange,
        codec: contract.Codec,
        link: contract.Link | None,
        world: World,
        folder: Path | None,
    ):
        self.job, self.engine, self.world, self.link = job, engine, world, link
        self.witness = Witness.of_environment()
        if self.witness:
            self.witness.prepare(job.model)
        engine.open(job.model, job.optimizer, job.loss, job.metric)
        self.leader = world.node == 0 and world.local_rank == 0
        if link:
            _compare(link, job, engine, exchange, codec)
        rows = -(-job.batch_size // world.num_nodes)
        if world.local_rank == 0:
            exchange.open(engine.specs, link or _alone(), codec, rows, job.seed)
        else:
            exchange.link = contract.Link()
            exchange.link.size = world.num_nodes
        self.exchange = engine.relay(exchange)
        self.exchange.spread(engine.weights)
        self.exchange.spread(engine.buffers)
        if world.num_nodes * world.local_size > 1:
            # dropout masks of different processes must differ, and those of two equal runs must not
            torch.manual_seed(job.seed * 100_003 + world.node * world.local_size + world.local_rank)
        if self.witness and self.leader:
            self.witness.begin(engine.state())
        seat = Seat(world.node, world.num_nodes, world.local_rank, world.local_size)
        self.stopwatch = Stopwatch.of_environment(self.leader)
        if self.leader and (stale := shelf.confirm(job.model, job.optimizer, job.batch_size)):
            print(f"paceline: {stale}; the next start measures again", file=sys.stderr)
        self.epochs = 0
        self.form = examine.asked()
        self.record = Record(folder if self.leader and not self.stopwatch and not self.form else None)
        host = os.environ.get("PACELINE_HOST", socket.gethostname())
        part = f", local rank {world.local_rank}" if world.local_size > 1 else ""
        who = f"rank {world.node} of {world.num_nodes} on {host}{part}"
        self.loop = Loop(engine, self.exchange, seat, self.record, job.clip, who=who)
        self.agreement = contract.Agreement(contract.Verdict.APPLY)
        if link:
            atexit.register(_leave, link)

    def batches(self, dataset: Any, epochs: int = 1, shuffle: bool = True) -> Iterator[feed.Batch]:
        """Every global batch, as the same sequence on any number of nodes; `step` takes this node's share."""
        job = self.job
        self.epochs = epochs
        if self.stopwatch:
            epochs = sys.maxsize  # a trial ends when it has enough steps, however small the data
        for batch in feed.batches(dataset, job.batch_size, epochs, job.seed, self.loop.seat, shuffle):
            yield batch
            if self.stopwatch:
                self.stopwatch.resume()  # what the loop did after its step (evaluation) is not the step's

    def step(self, batch: Any) -> float:
        """Forward, backward, agree, update. Returns the mean loss over the global batch.

        ``batch`` comes from `batches`, or is this process's own rows as (inputs, ..., target).
        """
        if not hasattr(batch, "share"):
            batch = feed.Given(batch, float(self.job.batch_size))
        if self.form:
            self._examine(batch, self.form)
        if self.stopwatch:
            batch = self._part(batch, self.stopwatch)
        if self.witness:
            batch = self.witness.cast(batch)
        try:
            self.agreement = self.loop.step(batch)
        except LinkError:
            # a thread still inside the network library when Python ends would abort the process
            self.exchange.close()
            raise
        ballot = self.agreement.ballot
        loss = ballot.loss_sum / ballot.weight if ballot.weight else float("nan")
        if self.stopwatch:
            self.stopwatch.tick(batch.weight, ballot.seconds)
        if self.witness:
            self.witness.step(loss, self.engine.state() if self.leader else None)
        return loss

    def _part(self, batch: Any, stopwatch: Stopwatch) -> Any:
        """The whole batch, or as much of it as the trial wants to see."""
        rows = stopwatch.part(int(batch.weight))
        if rows == int(batch.weight):
            return batch
        return feed.Given(layers.part(batch.share(self.loop.seat), rows, int(batch.weight)), float(rows))

    def _examine(self, batch: Any, form: Path) -> None:
        """Answers the form instead of training, and ends the process."""
        job, start = self.job, time.perf_counter()
        rows = batch.share(self.loop.seat)
        input_s = time.perf_counter() - start

        def compute(rows: Any) -> Tensor:
            *inputs, target = rows
            loss = job.loss(job.model(*inputs), target)
            return loss[0] if isinstance(loss, tuple) else loss  # type: ignore[no-any-return]

        steps = self.epochs * getattr(batch, "num_steps", 0)
        what = examine.Examined(
            job.model,
            job.optimizer,
            self.engine,
            compute,
            rows,
            int(batch.weight),
            job.batch_size,
            steps,
            job.clip,
            input_s,
        )
        examine.answer(form, what)

    def evaluate(self, dataset: Any, metric: Callable[[Any, Any], Any] | None = None, rows: int = 256) -> float:
        """Mean of ``metric`` (a sum over rows; the job's by default) over a dataset, every sample once.

        Every process must call it, as every process must call `step` and `save`.
        """
        metric = metric or self.job.metric
        if metric is None:
            raise ValueError("evaluate() needs a metric: a function (output, target) -> sum over rows")
        self.exchange.spread(self.engine.buffers)
        source, model = feed.as_source(dataset), self.job.model
        mine, total, was_training = self.loop.seat.rows(len(source)), 0.0, model.training
        model.eval()
        try:
            with torch.no_grad():
                for start in range(mine.start, mine.stop, rows):
                    *inputs, target = source.fetch(range(start, min(start + rows, mine.stop)), 0)
                    total += float(metric(model(*inputs), target))
        finally:
            model.train(was_training)
        whole, count = self.exchange.total([total, float(len(mine))])
        return whole / count

    def save(self, path: str | os.PathLike[str]) -> None:
        """The model's ``state_dict`` as safetensors, written by one process, whole or not at all. All must call it."""
        self.exchange.spread(self.engine.buffers)
        if self.leader:
            path = Path(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(path.name + ".part")
            save_file(_untied(self.engine.state()), aside)
            aside.replace(path)

    def close(self) -> None:
        """Leaves the others in peace. Called at the end of a ``with`` block."""
        self.exchange.close()
        self.engine.close()
        if self.link:
            self.link.close()
        self.record.close()

    def __enter__(self) -> Pace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any],
    *,
    batch_size: int,
    clip: float | None = None,
    seed: int = 0,
    metric: Callable[..., Any] | None = None,
    engine: str | None = None,
    exchange: str = "allreduce",
    codec: str = "none",
    folder: str | os.PathLike[str] | None = None,
) -> Pace:
    """Joins this process to the training: alone, or one of many, with the same script.

    ``batch_size`` is global. Who the others are comes from the launcher's environment; how this node
    computes from ``engine``, else PACELINE_ENGINE, else one thread per core. All nodes start from rank
    0's weights. Raises ValueError for wrong arguments, LinkError when the others cannot be reached.
    """
    job = Job(model, optimizer, loss, batch_size, clip, seed, metric)
    world = World.of_environment()
    chosen = engine or os.environ.get("PACELINE_ENGINE") or _default_engine(world)
    sys.excepthook = _one_line(sys.excepthook)
    link: contract.Link | None = None
    parts = parse("engine", chosen), parse("exchange", exchange), parse("codec", codec)
    if world.local_size > 1 and chosen != f"processes:{world.local_size}":
        raise ValueError(
            f"{world.local_size} processes were started on this node (LOCAL_WORLD_SIZE), but the engine is {chosen!r}; "
            f"use 'processes:{world.local_size}', or start one process per node"
        )
    if codec != "none" and not parts[1].uses_codec:
        raise ValueError(
            f"exchange {exchange!r} sends weights as they are and takes no codec, got {codec!r}; use 'none'"
        )
    if world.num_nodes > 1 and world.local_rank == 0:
        link = find("link", "torch", world.node, world.num_nodes, world.host, world.port, next(_joins))
    pace = Pace(job, *parts, link, world, Path(folder) if folder else None)
    pace.record.write(
        "join",
        engine=chosen,
        exchange=exchange,
        codec=codec,
        num_nodes=world.num_nodes,
        batch_size=batch_size,
    )
    return pace


def _default_engine(world: World) -> str:
    if world.local_size > 1:
        return f"processes:{world.local_size}"
    cores = len(os.sched_getaffinity(0))
    if cores > 1 and world.num_nodes == 1 and sys.stderr.isatty():
        print(
            f"paceline: threads:{cores}, unmeasured; `paceline run SCRIPT` measures and may be faster",
            file=sys.stderr,
        )
    return f"threads:{cores}"


def _compare(
    link: contract.Link, job: Job, engine: contract.Engine, exchange: contract.Exchange, codec: contract.Codec
) -> None:
    """Raises ValueError, on every node, naming what the nodes were given differently."""
    shapes = [(spec.names, spec.shapes) for spec in engine.specs]
    facts = {
        "batch_size": job.batch_size,
        "seed": job.seed,
        "clip": job.clip,
        "exchange": (type(exchange).__module__, sorted(map(str, vars(exchange).items()))),
        "codec": (type(codec).__module__, codec.wire),
        "model": [str(shapes), [str(weight.dtype) for weight in engine.weights], len(engine.buffers)],
        "torch": torch.__version__,
    }
    mine = b"".join(hashlib.sha256(repr(fact).encode()).digest() for fact in facts.values())
    everyone = link.all_gather(torch.tensor(list(mine), dtype=torch.uint8), "comparing jobs", even=True).wait()
    for i, (name, fact) in enumerate(facts.items()):
        words = [bytes(part[32 * i : 32 * (i + 1)].tolist()) for part in everyone]
        if len(set(words)) > 1:
            others = [rank for rank in range(link.size) if words[rank] != words[link.rank]]
            raise ValueError(
                f"join: the nodes were given different {name}: rank {link.rank} has {str(fact)[:200]}, ranks {others} "
                f"have another; start every node with the same script, arguments, data and versions"
            )


def _leave(link: contract.Link) -> None:
    """A script that simply ends has left; one that ends by an error has died, and its peers should know."""
    if not getattr(sys.excepthook, "failed", False):
        link.close()


def _alone() -> contract.Link:
    from paceline.link.memory import world

    return world(1)[0]


def _untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights share storage, which safetensors refuses: each name gets its own copy."""
    seen: set[int] = set()
    out = {}
    for name, tensor in state.items():
        out[name] = tensor.detach().clone() if tensor.data_ptr() in seen else tensor.detach().contiguous()
        seen.add(tensor.data_ptr())
    return out


def _one_line(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A broken link is not a bug in the script: one line says it, without a traceback."""
    if getattr(hook, "paceline", False):
        return hook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show.failed = True  # type: ignore[attr-defined]
        if isinstance(error, LinkError | FloatingPointError):
            sys.stderr.write(f"paceline: {error}\n")  # in one piece: others write to the same terminal
        else:
            hook(kind, error, trace)

    show.paceline = True  # type: ignore[attr-defined]
    return show
