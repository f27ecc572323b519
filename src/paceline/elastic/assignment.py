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

MIN_ROWS = 2  # per process, where batches are normalised


def place(job: Job, world: LaunchEnvironment, virtual: int = 0) -> Assignment:
    """The assignment of this process. ``virtual``: the batch is assigned in so many virtual shards; 0: row by row.
    Raises ValueError for shares of another number of nodes; a single node has all rows."""
    shares = None if world.num_nodes == 1 or isinstance(job.shares, str) else job.shares
    if shares and len(shares) != world.num_nodes:
        raise ValueError(
            f"join: shares={shares} are for {len(shares)} nodes, and the run has {world.num_nodes}; give a number "
            f"for each node, or 'measured' or 'equal'"
        )
    least = MIN_ROWS if normalises(job) else 1
    return Assignment(
        world.node, world.num_nodes, world.local_rank, world.local_size, shares, virtual, least, job.batch_size
    )


def settle(
    assignment: Assignment, job: Job, engine: Engine, control: Control
) -> tuple[Assignment, LoadBalancer | None, Limits]:
    """All nodes exchange their limits. Returns the first assignment, its load balancer if it has one, and the limits.

    Every process must call it. Raises ValueError, in all processes, where the batch does not fit."""
    count, nodes = job.batch_size, assignment.num_nodes
    mine = json.dumps([assignment.node, _least(assignment, job, engine), job.most_rows or count]).encode()
    reports = [json.loads(text) for text in control.all_gather(mine)]
    # a node that has failed since reports nothing, and keeps its assignment until the membership changes
    groups = [[each for each in reports if each[0] == node] or [[node, 1, count]] for node in range(nodes)]
    most = [min(count, *(each for _, _, each in local_group)) for local_group in groups]
    least = [min(local_group[0][1], limit, count // nodes) for local_group, limit in zip(groups, most, strict=True)]
    if sum(most) < count:
        raise ValueError(
            f"join: batch_size is {count}, and the nodes take at most {' + '.join(map(str, most))} rows of it "
            f"(most_rows); raise most_rows, lower batch_size, or use accumulate instead"
        )
    rows = assignment.rows_per_node(count)
    if over := [node for node in range(nodes) if rows[node] > most[node]]:
        if assignment.shares:
            raise ValueError(
                f"join: shares={assignment.shares} give node {over[0]} {rows[over[0]]} of {count} rows, and its "
                f"most_rows is {most[over[0]]}; give it less, or use shares='measured'"
            )
        shares = fair_shares(count, [0.0] * nodes, [1.0] * nodes, least, most)
        assignment = dataclasses.replace(assignment, shares=shares)
    follows = job.shares == "measured" and nodes > 1 and not assignment.virtual
    return assignment, LoadBalancer(count, least, most) if follows else None, Limits(tuple(least), tuple(most))


def alone(assignment: Assignment, job: Job, engine: Engine, control: Control) -> Limits:
    """The limits of a joining node. Every process of it must call it."""
    mine = json.dumps([_least(assignment, job, engine), job.most_rows or job.batch_size]).encode()
    least, most = zip(*(json.loads(text) for text in control.all_gather(mine)), strict=True)
    return Limits((least[0],), (min(job.batch_size, *most),))


def load_balancer(count: int, limits: Limits) -> LoadBalancer:
    """What changes the assignment as the nodes' speed changes."""
    return LoadBalancer(count, limits.least, _bound(count, limits))


def regroup(
    assignment: Assignment, balance: LoadBalancer | None, count: int, limits: Limits, change: ViewChange
) -> tuple[Assignment, LoadBalancer | None, Limits]:
    """Divides the batch among the present nodes, in proportion to their rows before, which all processes know. A new
    node has as many as the others have on average, until its speed is known.

    If the limits of the nodes are below the whole batch, they compute more than their limits, in more micro-batches."""
    previous, joined, nodes = change.previous_ranks, change.joined, len(change.previous_ranks) + len(change.joined)
    rows = (*change.rows, *(sum(change.rows) / len(change.rows) for _ in joined))
    least = (*(limits.least[rank] for rank in previous), *(joiner.least for joiner in joined))
    most = (*(limits.most[rank] for rank in previous), *(joiner.most for joiner in joined))
    limits = Limits(tuple(min(each, count // nodes) for each in least), most)
    bound, shares = _bound(count, limits), None
    if not assignment.virtual and (max(rows) > min(rows) + 1 or count > nodes * min(bound)):
        shares = fair_shares(count, [0.0] * nodes, [1 / max(1, each) for each in rows], limits.least, bound)
    assignment = dataclasses.replace(assignment, node=previous.index(assignment.node), num_nodes=nodes, shares=shares)
    return assignment, load_balancer(count, limits) if balance is not None and nodes > 1 else None, limits


def _bound(count: int, limits: Limits) -> tuple[int, ...]:
    """The limit of each node; the whole batch, if the sum of the limits is below it."""
    return limits.most if sum(limits.most) >= count else (count,) * len(limits.most)


def _least(assignment: Assignment, job: Job, engine: Engine) -> int:
    """The fewest rows of a node: with fewer, its speed is unknown, or batch norm has nothing to normalise."""
    passes: int = job.accumulate * getattr(engine, "num_replicas", 1)
    return assignment.local_size * (MIN_ROWS * passes if normalises(job) else 1)


def normalises(job: Job) -> bool:
    """Whether batch norm uses the statistics of each pass alone."""
    return job.batch_norm == "local" and bool(over_batches(job.model))
