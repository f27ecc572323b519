"""Handles a membership change: the new rank and batch share of this process, the leader's role, log and event log."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from paceline.checkpoint.run_folder import RunFolder
from paceline.data.load_balance import Limits
from paceline.data.sampler import Assignment
from paceline.elastic import assignment
from paceline.elastic.below_minimum import enough
from paceline.report.log import log
from paceline.step.run_state import RunState
from paceline.transport import ViewChange


class ViewChangeObserver(Protocol):
    """Notified of each change of the members (`admission.Admission`, `redistribution.Redistribution`)."""

    def on_view_change(self, change: ViewChange) -> None: ...


class ViewChangeHandler:
    """``folder``: what this process writes once it leads."""

    def __init__(self, run: RunState, folder: RunFolder):
        self.run, self.folder = run, folder
        self.observers: list[ViewChangeObserver] = []

    def on_view_change(self, change: ViewChange) -> None:
        self.assume_role(change)
        self.announce(change)

    def assume_role(self, change: ViewChange) -> None:
        """Gives this process its new rank, and the leader's role if the leader failed."""
        run, before = self.run, self.run.world
        sizes = (*(before.sizes[rank] for rank in change.previous_ranks), *(joiner.size for joiner in change.joined))
        new, _, limits = assignment.regroup(run.assignment, run.balance, run.job.batch_size, run.limits, change)
        set_assignment(run, new, limits, sizes)
        if before.local_rank:
            run.engine.reopen(None)
        elif run.world.node == 0 and not run.leader:
            run.leader = run.speaks = True  # the leader failed
            self.folder.take_over()
        for observer in self.observers:
            observer.on_view_change(change)

    def announce(self, change: ViewChange) -> None:
        """Logs the change, in the leader, and writes it to the event log."""
        run, num_nodes, texts = self.run, len(change.previous_ranks) + len(change.joined), []
        trains = enough(num_nodes, run.world.min_nodes)
        if change.lost or not change.joined:
            how = "continue" if trains else "are left"
            left = f"{len(change.previous_ranks)} of {len(change.previous_ranks) + len(change.lost)} nodes {how}"
            texts.append(f"{', '.join(change.lost) or 'no node'} failed at step {run.num_steps}; {left} ({change.why})")
        if change.joined:
            hosts = ", ".join(joiner.host for joiner in change.joined)
            does = "train" if trains else f"are present, of at least {run.world.min_nodes}"
            texts.append(f"{hosts} joined at step {run.num_steps}; {num_nodes} nodes {does}")
        texts += _over_limit(run)
        if run.leader:
            for text in texts:
                log.warning(text)
        run.record.write(
            "regroup",
            step=run.num_steps,
            generation=change.generation,
            lost=change.lost,
            came=[joiner.host for joiner in change.joined],
            num_nodes=num_nodes,
            shares=run.shares,
            seconds=change.seconds,
            why=change.why,
        )


def _over_limit(run: RunState) -> list[str]:
    """A line for each node that computes more rows at once than its most_rows."""
    if run.job.batch_norm != "sync" or run.assignment.virtual:
        return []
    return [
        f"node {node} computes {rows} rows at once, and its most_rows is {most}: batch_norm='sync' divides no batch"
        for node, (rows, most) in enumerate(zip(run.shares, run.limits.most, strict=True))
        if rows > most
    ]


def set_assignment(run: RunState, new: Assignment, limits: Limits, sizes: tuple[int, ...]) -> None:
    """Takes the new assignment. ``sizes``: the number of processes of each node."""
    unlike = sizes if len(set(sizes)) > 1 else ()
    run.world = dataclasses.replace(run.world, node=new.node, num_nodes=len(sizes), local_sizes=unlike, join_ticket="")
    run.assignment, run.identity, run.limits = new, run.world.identity, limits
    follows = run.balances and len(sizes) > 1
    run.balance = assignment.load_balancer(run.job.batch_size, limits) if follows else None
    # micro-batches divide virtual shards, which must stay the same ones; synchronised batch norm needs the whole batch
    whole = new.virtual or run.job.batch_norm == "sync"
    times = 1 if whole else max(1, -(-run.shares[new.node] // limits.most[new.node]))
    run.engine.accumulate = run.job.accumulate * times
