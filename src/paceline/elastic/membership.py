"""Who trains: after a loss, or when somebody came, a process has another seat, or leads. ``pace`` is `pace.Pace`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

from paceline.checkpoint.run_lock import claim
from paceline.contract import Regroup
from paceline.elastic import assignment
from paceline.elastic.below_minimum import enough


def regroup(pace: Any, news: Regroup) -> None:
    move(pace, news)
    tell(pace, news)


def move(pace: Any, news: Regroup) -> None:
    """This process has another seat from now on."""
    loop, before = pace.loop, pace.world
    sizes = (*(before.sizes[rank] for rank in news.origin), *(guest.size for guest in news.came))
    seat, _, limits = assignment.regroup(loop.seat, loop.balance, pace.job.batch_size, pace._limits, news)
    sit(pace, seat, limits, sizes)
    if before.local_rank:
        pace.engine.relink(None)
    elif pace.world.node == 0 and not pace.leader:
        _lead(pace)
    if pace._welcome:
        pace._welcome.note(news)


def tell(pace: Any, news: Regroup) -> None:
    """On the screen and in the record, where this process leads."""
    step, num_nodes, words = pace.loop.num_steps, len(news.origin) + len(news.came), []
    if news.lost or not news.came:
        how = "go on" if enough(num_nodes, pace.world.least) else "are left"
        left = f"{len(news.origin)} of {len(news.origin) + len(news.lost)} nodes {how} ({news.why})"
        words.append(f"lost {', '.join(news.lost) or 'no node'} at step {step}; {left}")
    if news.came:
        came = ", ".join(guest.host for guest in news.came)
        words.append(f"{came} came at step {step}; {num_nodes} nodes {_do(pace, num_nodes)}")
    words += _too_many(pace)
    if pace.leader:
        print(*(f"paceline: {each}" for each in words), sep="\n", file=sys.stderr)
    pace.record.write(
        "regroup",
        step=step,
        generation=news.generation,
        lost=news.lost,
        came=[guest.host for guest in news.came],
        num_nodes=num_nodes,
        shares=pace.shares,
        seconds=news.seconds,
        why=news.why,
    )


def _do(pace: Any, num_nodes: int) -> str:
    return "train" if enough(num_nodes, pace.world.least) else f"are here, of at least {pace.world.least}"


def _too_many(pace: Any) -> list[str]:
    """Of the nodes that are left, whose most_rows is not kept."""
    if pace.job.batch_norm != "sync" or pace.loop.seat.virtual:
        return []
    return [
        f"node {node} computes {rows} rows at once, and its most_rows is {most}: batch_norm='sync' divides no batch"
        for node, (rows, most) in enumerate(zip(pace.shares, pace._limits.most, strict=True))
        if rows > most
    ]


def sit(pace: Any, seat: Any, limits: assignment.Limits, sizes: tuple[int, ...]) -> None:
    """From now on in this seat, among nodes of so many processes each."""
    loop, job = pace.loop, pace.job
    unlike = sizes if len(set(sizes)) > 1 else ()
    pace.world = dataclasses.replace(pace.world, node=seat.node, num_nodes=len(sizes), local_sizes=unlike, late="")
    loop.seat, loop.who, pace._limits = seat, pace._who(), limits
    loop.balance = assignment.follow(job.batch_size, limits) if pace._follows and len(sizes) > 1 else None
    # virtual shares are cut into micro-batches, which must stay the same ones, and a norm over all has none
    whole = seat.virtual or job.batch_norm == "sync"
    times = 1 if whole else max(1, -(-pace.shares[seat.node] // limits.most[seat.node]))
    pace.engine.accumulate = job.accumulate * times
    if loop.drift:
        loop.drift.divided = max(sizes) > 1


def _lead(pace: Any) -> None:
    """The leader was lost: what one of all does is this process's from now on."""
    pace.leader = pace._speaks = True
    if pace.loop.drift:
        pace.loop.drift.leads = True
    pace.loop.stragglers = pace._stragglers()
    if pace.folder and not pace.watched:
        from paceline.report.usage import Usage

        with contextlib.suppress(OSError):  # the leader before may only be stopped, and hold it still
            pace._claim = claim(pace.folder)
        try:
            pace.record.open(pace.folder)
        except OSError as error:  # the folder may be that of the lost node alone
            print(
                f"paceline: {pace.folder} cannot be written here ({error.strerror or error}): training goes on without "
                f"a record, until it is to be saved; let every node write there",
                file=sys.stderr,
            )
            return
        pace._usage = Usage(pace.record).start()
