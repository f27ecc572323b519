"""All who start a run together meet: they are compared, have the same weights, and know whose each row is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from paceline import contract
from paceline.contract import Codec, Engine, Exchange, Regroup
from paceline.elastic import assignment
from paceline.elastic.consistency import compare, digests, facts, thin
from paceline.elastic.fault_tolerant import Surviving
from paceline.elastic.membership import Members
from paceline.environment import World
from paceline.exchange.flow.broadcast import marks, plant
from paceline.exchange.flow.control import Control
from paceline.job import Job
from paceline.step import buffer_broadcast
from paceline.step.run_state import RunState


@dataclass
class Start:
    """``surviving``: the control, where losses end nothing; ``said``: what a node that joins late is compared with.
    ``met``: who was lost meanwhile, to be told. ``several``: parts of a batch are computed apart."""

    run: RunState
    surviving: Surviving | None
    several: bool
    said: dict[str, str] = field(default_factory=dict)
    met: list[Regroup] = field(default_factory=list)


def start(
    job: Job,
    engine: Engine,
    exchange: Exchange,
    codec: Codec,
    members: Members,
    linked: bool,
    world: World,
    watched: bool,
) -> Start:
    """``linked``: this process holds the link of its node to others. Every process must call it.

    Raises ValueError, everywhere, for what does not fit together; LinkError.
    """
    methods = {"exchange": _kind(exchange), "codec": _kind(codec)}
    several = bool(world.size > 1 or engine.num_shares or getattr(engine, "num_replicas", 1) > 1)
    _open(engine, job, several, bool(world.least))
    said: dict[str, str] = {}
    if linked:
        compare(members.link, job, engine, exchange, codec)
        exchange.thin = thin(members.link, engine)
        if world.least:
            said = digests(facts(job, engine, exchange, codec), exchange.thin)
    seat = assignment.place(job, world, engine.num_shares)
    exchange.multiply, exchange.hands = engine.multiply, world.local_size
    surviving: Surviving | None = None
    plain = Control(members, votes=exchange.consensus == "step")
    own: contract.Control = plain
    if world.least:
        members.stand_by(world.least)
        surviving = own = Surviving(plain, [exchange.rebuild, engine.relink])
        surviving.rows = lambda: seat.dealt(job.batch_size)[world.node]
    if world.local_rank == 0:
        exchange.open(engine.specs, members.link, codec, max(seat.dealt(job.batch_size)), job.seed, engine.absorbs)
    apart = world.num_nodes > 1 or bool(world.late)
    seen, control = engine.relay(exchange, own, not apart, members.activity)
    met = list[Regroup]()
    control.regrouped = met.append
    if job.batch_norm == "sync":
        engine.sync_norm(members.link if linked else None)
    _spread(job, engine, own, control, world)
    leader = world.node == 0 and world.local_rank == 0 and not world.late
    run = RunState(
        job,
        world,
        engine,
        seen,
        control,
        codec,
        members,
        seat,
        who=world.who,
        clip=job.clip,
        activity=members.activity,
        methods=methods,
        leader=leader,
        # with the same words from everyone, one process says them
        speaks=leader if exchange.consensus == "step" else world.local_rank == 0,
        watched=watched,
    )
    if world.late:
        run.limits = assignment.alone(seat, job, engine, control)
    else:
        run.seat, run.balance, run.limits = assignment.settle(seat, job, engine, control)
    run.balances = job.shares == "measured" and not run.seat.virtual and not watched
    run.balance = run.balance if run.balances else None
    if world.size > 1:
        # dropout masks of different processes must differ, and those of two equal runs must not
        torch.manual_seed(job.seed * 100_003 + world.rank)
    return Start(run, surviving, several, said, met)


def _open(engine: Engine, job: Job, several: bool, may_grow: bool) -> None:
    engine.divided = several or job.accumulate > 1 or may_grow
    engine.open(job.model, job.optimizer, job.loss, job.metric)
    if engine.divided:
        job.check_divided()
    if several:
        job.check_norms()


def _spread(job: Job, engine: Engine, own: contract.Control, control: contract.Control, world: World) -> None:
    """Rank 0's weights and buffers, and marks by which all see that they stay who they are."""
    control.spread(engine.weights)
    control.spread(engine.buffers)
    if world.size > 1:
        buffer_broadcast.spread_sparse(job.model, engine, control)
        plant(job.model, control, own, engine.seat)
        engine.still = marks(job.model)


def _kind(part: Any) -> str:
    """The name of a method, with that of the one it wraps."""
    name, inner = type(part).__module__.rpartition(".")[2], getattr(part, "inner", None)
    return f"{name}/{_kind(inner)}" if inner else name
