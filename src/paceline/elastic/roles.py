"""Roles after a membership change: a process has another rank, or becomes the leader."""

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


class Notes(Protocol):
    """What is told of other members (`admission.Admission`, `redeal.Redeal`)."""

    def note(self, news: ViewChange) -> None: ...


class Roles:
    """``folder``: what this process writes once it leads."""

    def __init__(self, run: RunState, folder: RunFolder):
        self.run, self.folder = run, folder
        self.told: list[Notes] = []

    def on_view_change(self, news: ViewChange) -> None:
        self.move(news)
        self.announce(news)

    def move(self, news: ViewChange) -> None:
        """This process has another rank from now on."""
        run, before = self.run, self.run.world
        sizes = (*(before.sizes[rank] for rank in news.previous_ranks), *(joiner.size for joiner in news.joined))
        mine, _, limits = assignment.regroup(run.assignment, run.balance, run.job.batch_size, run.limits, news)
        assume(run, mine, limits, sizes)
        if before.local_rank:
            run.engine.reopen(None)
        elif run.world.node == 0 and not run.leader:
            run.leader = run.speaks = True  # the leader was lost
            self.folder.take_over()
        for each in self.told:
            each.note(news)

    def announce(self, news: ViewChange) -> None:
        """On the screen and in the record, where this process leads."""
        run, num_nodes, words = self.run, len(news.previous_ranks) + len(news.joined), []
        trains = enough(num_nodes, run.world.min_nodes)
        if news.lost or not news.joined:
            how = "go on" if trains else "are left"
            left = f"{len(news.previous_ranks)} of {len(news.previous_ranks) + len(news.lost)} nodes {how} ({news.why})"
            words.append(f"lost {', '.join(news.lost) or 'no node'} at step {run.num_steps}; {left}")
        if news.joined:
            came = ", ".join(joiner.host for joiner in news.joined)
            does = "train" if trains else f"are here, of at least {run.world.min_nodes}"
            words.append(f"{came} came at step {run.num_steps}; {num_nodes} nodes {does}")
        words += _too_many(run)
        if run.leader:
            for each in words:
                log.warning(each)
        run.record.write(
            "regroup",
            step=run.num_steps,
            generation=news.generation,
            lost=news.lost,
            came=[joiner.host for joiner in news.joined],
            num_nodes=num_nodes,
            shares=run.shares,
            seconds=news.seconds,
            why=news.why,
        )


def _too_many(run: RunState) -> list[str]:
    """Of the nodes that are left, whose most_rows is not kept."""
    if run.job.batch_norm != "sync" or run.assignment.virtual:
        return []
    return [
        f"node {node} computes {rows} rows at once, and its most_rows is {most}: batch_norm='sync' divides no batch"
        for node, (rows, most) in enumerate(zip(run.shares, run.limits.most, strict=True))
        if rows > most
    ]


def assume(run: RunState, mine: Assignment, limits: Limits, sizes: tuple[int, ...]) -> None:
    """From now on in this seat, among nodes of so many processes each."""
    unlike = sizes if len(set(sizes)) > 1 else ()
    run.world = dataclasses.replace(run.world, node=mine.node, num_nodes=len(sizes), local_sizes=unlike, join_ticket="")
    run.assignment, run.identity, run.limits = mine, run.world.identity, limits
    follows = run.balances and len(sizes) > 1
    run.balance = assignment.follow(run.job.batch_size, limits) if follows else None
    # virtual shares are cut into micro-batches, which must stay the same ones, and a norm over all has none
    whole = mine.virtual or run.job.batch_norm == "sync"
    times = 1 if whole else max(1, -(-run.shares[mine.node] // limits.most[mine.node]))
    run.engine.accumulate = run.job.accumulate * times
