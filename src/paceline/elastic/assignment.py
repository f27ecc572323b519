"""Assignment of samples to processes when training begins, and whether it follows the nodes' speed later."""

from __future__ import annotations

import dataclasses
import json

from paceline.contract import Engine
from paceline.data.load_balance import Limits, LoadBalancer, fair_shares
from paceline.data.sampler import Assignment
from paceline.engine.checks.norm_layers import over_batches
from paceline.environment import LaunchEnvironment
from paceline.job import Job
from paceline.transport import Control, ViewChange

MIN_ROWS = 2  # rows, where batches are normalised


def place(job: Job, world: LaunchEnvironment, virtual: int = 0) -> Assignment:
    """This process's. ``virtual``: shares that the batch is dealt in; 0: rows.

    Raises ValueError for shares of another number of nodes; one node alone has all rows.
    """
    shares = None if world.num_nodes == 1 or isinstance(job.shares, str) else job.shares
    if shares and len(shares) != world.num_nodes:
        raise ValueError(
            f"join: shares={shares} are for {len(shares)} nodes, and {world.num_nodes} are here; give a number for "
            f"each node, or 'measured' or 'equal'"
        )
    least = MIN_ROWS if normalises(job) else 1
    return Assignment(
        world.node, world.num_nodes, world.local_rank, world.local_size, shares, virtual, least, job.batch_size
    )


def settle(
    assignment: Assignment, job: Job, engine: Engine, control: Control
) -> tuple[Assignment, LoadBalancer | None, Limits]:
    """With what every node can take, which all tell each other: the seat to begin with, and what moves it, if anything.

    Every process must call it. Raises ValueError, everywhere, where the batch does not fit."""
    count, nodes = job.batch_size, assignment.num_nodes
    mine = json.dumps([assignment.node, _least(assignment, job, engine), job.most_rows or count]).encode()
    said = [json.loads(words) for words in control.all_gather(mine)]
    # who was lost meanwhile says nothing, and has its seat until all are told of it
    crews = [[each for each in said if each[0] == node] or [[node, 1, count]] for node in range(nodes)]
    most = [min(count, *(each for _, _, each in local_group)) for local_group in crews]
    least = [min(local_group[0][1], limit, count // nodes) for local_group, limit in zip(crews, most, strict=True)]
    if sum(most) < count:
        raise ValueError(
            f"join: batch_size is {count}, and the nodes take at most {' + '.join(map(str, most))} rows of it "
            f"(most_rows); raise most_rows, lower batch_size, or use accumulate instead"
        )
    dealt = assignment.rows_per_node(count)
    if over := [node for node in range(nodes) if dealt[node] > most[node]]:
        if assignment.shares:
            raise ValueError(
                f"join: shares={assignment.shares} give node {over[0]} {dealt[over[0]]} of {count} rows, and its "
                f"most_rows is {most[over[0]]}; give it less, or use shares='measured'"
            )
        shares = fair_shares(count, [0.0] * nodes, [1.0] * nodes, least, most)
        assignment = dataclasses.replace(assignment, shares=shares)
    follows = job.shares == "measured" and nodes > 1 and not assignment.virtual
    return assignment, LoadBalancer(count, least, most) if follows else None, Limits(tuple(least), tuple(most))


def alone(assignment: Assignment, job: Job, engine: Engine, control: Control) -> Limits:
    """Of a node that comes late. Every process of it must call it."""
    mine = json.dumps([_least(assignment, job, engine), job.most_rows or job.batch_size]).encode()
    least, most = zip(*(json.loads(words) for words in control.all_gather(mine)), strict=True)
    return Limits((least[0],), (min(job.batch_size, *most),))


def follow(count: int, limits: Limits) -> LoadBalancer:
    """What moves the seats from now on."""
    return LoadBalancer(count, limits.least, _bound(count, limits))


def regroup(
    assignment: Assignment, balance: LoadBalancer | None, count: int, limits: Limits, news: ViewChange
) -> tuple[Assignment, LoadBalancer | None, Limits]:
    """Among the nodes that are left, in proportion to the rows that they had: all are told the same of these. New ones
    have as many as the others have on average, until their speed is known.

    Where the nodes take less than the whole batch, they are given more than they take: in more micro-batches."""
    origin, came, nodes = news.previous_ranks, news.joined, len(news.previous_ranks) + len(news.joined)
    rows = (*news.rows, *(sum(news.rows) / len(news.rows) for _ in came))
    least = (*(limits.least[rank] for rank in origin), *(joiner.least for joiner in came))
    most = (*(limits.most[rank] for rank in origin), *(joiner.most for joiner in came))
    limits = Limits(tuple(min(each, count // nodes) for each in least), most)
    bound, shares = _bound(count, limits), None
    if not assignment.virtual and (max(rows) > min(rows) + 1 or count > nodes * min(bound)):
        shares = fair_shares(count, [0.0] * nodes, [1 / max(1, each) for each in rows], limits.least, bound)
    assignment = dataclasses.replace(assignment, node=origin.index(assignment.node), num_nodes=nodes, shares=shares)
    return assignment, follow(count, limits) if balance is not None and nodes > 1 else None, limits


def _bound(count: int, limits: Limits) -> tuple[int, ...]:
    """What each node takes; the whole batch, where together they would take less."""
    return limits.most if sum(limits.most) >= count else (count,) * len(limits.most)


def _least(assignment: Assignment, job: Job, engine: Engine) -> int:
    """Rows without which a node's speed is not known any more, or without which batch norm has nothing to normalise."""
    passes: int = job.accumulate * getattr(engine, "num_replicas", 1)
    return assignment.local_size * (MIN_ROWS * passes if normalises(job) else 1)


def normalises(job: Job) -> bool:
    """Each pass by its own rows."""
    return job.batch_norm == "local" and bool(over_batches(job.model))
