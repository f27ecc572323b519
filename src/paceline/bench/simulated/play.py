"""One simulated training from beginning to end, and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial

from paceline.bench.simulated import laws
from paceline.bench.simulated.rank import Rank
from paceline.bench.simulated.schedule import Schedule
from paceline.bench.simulated.ways import give_back
from paceline.link.faults import Net
from paceline.link.memory import Link


@dataclass
class Outcome:
    """``fired``: how often each class of fault had its effect. ``violations``: none, if all is well."""

    schedule: Schedule
    fired: Counter[str]
    violations: list[str]
    history: list[str] = field(repr=False, default_factory=list)
    num_messages: int = 0
    num_meetings: int = 0  # after which somebody went on
    left_out: int = 0  # ranks without which others went on though they were alive
    given_up: bool = False  # some lived, and nobody was allowed to go on


def play(schedule: Schedule) -> Outcome:
    net, ranks = Net(schedule.seed, schedule.faults), list[Rank]()

    def begin(link: Link) -> None:
        rank = Rank(link, net, schedule)
        ranks.append(rank)
        rank.train()

    for link in net.links(schedule.size):
        net.start(link.rank, partial(begin, link))
    failed = []
    try:
        net.run()
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}")
    ranks.sort(key=lambda rank: rank.id)
    found = failed or laws.broken(schedule, net, ranks, alone(schedule) if schedule.how.virtual else 0)
    if not failed:
        give_back([rank.kit for rank in ranks])
    lived = [rank for rank in ranks if rank.id not in net.dead]
    given_up = bool(lived) and not any(rank.finished for rank in lived)
    left_out = sum(not rank.finished for rank in lived)
    return Outcome(schedule, net.fired, found, net.history, net.num_messages, net.num_hubs - 1, left_out, given_up)


def alone(schedule: Schedule) -> int:
    return _alone(schedule.way, schedule.samples)


@cache
def _alone(way: str, samples: int) -> int:
    """The checksum of the weights after all steps, by one rank."""
    net, done = Net(0, {}), list[Rank]()

    def train() -> None:
        done.append(Rank(net.links(1)[0], net, Schedule(0, 1, {}, way, samples)))
        done[0].train()

    net.start(0, train)
    net.run()
    return done[0].checksum()
