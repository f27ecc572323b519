"""Start of a run: all processes rendezvous, compare their jobs, receive rank 0's weights, and get their samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from paceline import transport
from paceline.contract import Codec, Engine, Exchange
from paceline.elastic import assignment
from paceline.elastic.consistency import common_precision, compare, digests, facts
from paceline.elastic.fault_tolerant import FaultTolerantControl
from paceline.elastic.membership import Members
from paceline.environment import LaunchEnvironment
from paceline.exchange.flow.broadcast import marks, plant
from paceline.exchange.flow.control import Control
from paceline.job import Job
from paceline.registry import CODEC, SIXTEEN_BITS, parse
from paceline.step import buffer_broadcast
from paceline.step.run_state import RunState
from paceline.transport import ViewChange


@dataclass
class Start:
    """``fault_tolerant``: the control, if failures are survived; ``digests``: what a joining node's are compared with.
    ``changes``: failures meanwhile, still to be logged. ``several``: a batch is computed in several parts."""

    run: RunState
    fault_tolerant: FaultTolerantControl | None
    several: bool
    digests: dict[str, str] = field(default_factory=dict)
    changes: list[ViewChange] = field(default_factory=list)


def start(
    job: Job,
    engine: Engine,
    exchange: Exchange,
    codec: Codec,
    members: Members,
    linked: bool,
    world: LaunchEnvironment,
    watched: bool,
) -> Start:
    """``linked``: this process holds the link of its node to others. Every process must call it. Raises ValueError, in
    all processes, for arguments that do not fit together; LinkError."""
    methods = {"exchange": _kind(exchange), "codec": _kind(codec)}
    several = bool(world.world_size > 1 or engine.num_virtual_shards or getattr(engine, "num_replicas", 1) > 1)
    _open(engine, job, several, bool(world.min_nodes))
    its_digests: dict[str, str] = {}
    if linked:
        compare(members.link, job, engine, exchange, codec)
        precision = common_precision(members.link, engine)
        exchange.factor_codec = parse("codec", f"{SIXTEEN_BITS}:{precision}" if precision else CODEC)
        if world.min_nodes:
            its_digests = digests(facts(job, engine, exchange, codec), precision)
    mine = assignment.place(job, world, engine.num_virtual_shards)
    exchange.multiply, exchange.num_multipliers = engine.multiply, world.local_size
    fault_tolerant: FaultTolerantControl | None = None
    plain = Control(members, votes=exchange.consensus == "step")
    own: transport.Control = plain
    if world.min_nodes:
        members.stand_by(world.min_nodes)
        fault_tolerant = own = FaultTolerantControl(plain, [exchange.rebuild, engine.reopen])
        fault_tolerant.rows = lambda: mine.rows_per_node(job.batch_size)[world.node]
    if world.local_rank == 0:
        exchange.open(engine, members.link, codec, max(mine.rows_per_node(job.batch_size)), job.seed)
    apart = world.num_nodes > 1 or bool(world.join_ticket)
    local_exchange, control = engine.local_exchange(exchange, own, not apart, members.activity)
    changes = list[ViewChange]()
    control.on_view_change = changes.append
    if job.batch_norm == "sync":
        engine.sync_norm(members.link if linked else None)
    _broadcast(job, engine, own, control, world)
    leader = world.node == 0 and world.local_rank == 0 and not world.join_ticket
    run = RunState(
        job,
        world,
        engine,
        local_exchange,
        control,
        codec,
        members,
        mine,
        identity=world.identity,
        clip=job.clip,
        activity=members.activity,
        methods=methods,
        leader=leader,
        # if all processes report the same, one of them does
        speaks=leader if exchange.consensus == "step" else world.local_rank == 0,
        watched=watched,
    )
    if world.join_ticket:
        run.limits = assignment.alone(mine, job, engine, control)
    else:
        run.assignment, run.balance, run.limits = assignment.settle(mine, job, engine, control)
    run.balances = job.shares == "measured" and not run.assignment.virtual and not watched
    run.balance = run.balance if run.balances else None
    if world.world_size > 1:
        # dropout masks of different processes must differ, and those of two equal runs must not
        torch.manual_seed(job.seed * 100_003 + world.rank)
    return Start(run, fault_tolerant, several, its_digests, changes)


def _open(engine: Engine, job: Job, several: bool, may_grow: bool) -> None:
    engine.divided = several or job.accumulate > 1 or may_grow
    engine.open(job.model, job.optimizer, job.loss, job.metric)
    if engine.divided:
        job.check_divided()
    if several:
        job.check_norms()


def _broadcast(
    job: Job, engine: Engine, own: transport.Control, control: transport.Control, world: LaunchEnvironment
) -> None:
    """Broadcasts rank 0's weights and buffers, and the marks that show whether frozen parameters stay the same."""
    control.broadcast(engine.weights)
    control.broadcast(engine.buffers)
    if world.world_size > 1:
        buffer_broadcast.broadcast_sparse(job.model, engine, control)
        plant(job.model, control, own, engine.local_place)
        engine.still = marks(job.model)


def _kind(part: Any) -> str:
    """The name of a method, with that of the method it wraps."""
    name, inner = type(part).__module__, getattr(part, "inner", None)
    name = name.rpartition(".")[2] if name.startswith("paceline.") else f"{name}:{type(part).__qualname__}"
    return f"{name}/{_kind(inner)}" if inner else name
