"""One simulated training from beginning to end, and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial

from torch import Tensor

from paceline.link.memory import Members
from paceline_bench.simulated import invariants
from paceline_bench.simulated.fault_link import Net
from paceline_bench.simulated.follower import Follower
from paceline_bench.simulated.node import Mesh
from paceline_bench.simulated.rank import Rank
from paceline_bench.simulated.returns import Launcher
from paceline_bench.simulated.scenarios import give_back
from paceline_bench.simulated.schedule import Schedule


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
    num_starts: int = 1  # of all nodes: more where nobody was left with the state
    num_admitted: int = 0  # nodes that returned, and were sent the state


MAX_STARTS = 4
HAS = "has the state after"  # in the history


def play(schedule: Schedule) -> Outcome:
    return _play_waiting(schedule) if schedule.minimum else _play(schedule)


def _play(schedule: Schedule) -> Outcome:
    net, ranks, followers = Net(schedule.seed, schedule.faults), list[Rank](), list[Follower]()

    def begin(members: Members) -> None:
        who, num_processes = members.link.rank, schedule.how.processes
        mesh = Mesh(net, num_processes) if num_processes > 1 else None
        for local_rank in range(1, num_processes):
            assert mesh
            net.start(who, partial(follow, who, local_rank, mesh))
        rank = Rank(members, net, schedule, mesh=mesh)
        ranks.append(rank)
        rank.train()

    def follow(node: int, local_rank: int, mesh: Mesh) -> None:
        follower = Follower(node, local_rank, mesh, net, schedule)
        followers.append(follower)
        follower.train()

    for link in net.links(schedule.size):
        net.start(link.rank, partial(begin, Members(link)))
    failed = []
    try:
        net.run()
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}")
    ranks.sort(key=lambda rank: rank.id)
    found = failed or invariants.broken(schedule, net, ranks, alone(schedule) if schedule.how.virtual else 0)
    if not failed:
        give_back([rank.kit for rank in ranks] + [follower.kit for follower in followers])
    lived = [rank for rank in ranks if rank.id not in net.dead]
    given_up = bool(lived) and not any(rank.finished for rank in lived)
    left_out = sum(not rank.finished for rank in lived)
    return Outcome(schedule, net.fired, found, net.history, net.num_messages, net.num_hubs - 1, left_out, given_up)


def _play_waiting(schedule: Schedule) -> Outcome:
    """Nodes that fail are started again, and where nobody is left who has the state, all of them from a checkpoint."""
    newest: tuple[int, Tensor] | None = None
    history, found, fired, messages, meetings, left_out = list[str](), list[str](), Counter[str](), 0, 0, 0
    for start in range(MAX_STARTS):
        net, launcher, ranks = _start(schedule, start, newest)
        try:
            net.run()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        ranks.sort(key=lambda rank: rank.id)
        found += invariants.broken_waiting(schedule, net, ranks, newest[0] if newest else 0)
        give_back([rank.kit for rank in ranks])
        history += [f"start {start}", *net.history]
        fired, messages, meetings = fired + net.fired, messages + net.num_messages, meetings + net.num_hubs - 1
        left_out += sum(rank.id not in net.dead and not rank.finished for rank in ranks)
        newest = launcher.newest or newest
        if found or any(rank.finished for rank in ranks):
            break
    else:
        found.append(f"nobody finished in {MAX_STARTS} starts")
    admitted = sum(HAS in line for line in history)
    return Outcome(schedule, fired, found, history, messages, meetings, left_out, False, start + 1, admitted)


def _start(schedule: Schedule, start: int, newest: tuple[int, Tensor] | None) -> tuple[Net, Launcher, list[Rank]]:
    ranks = list[Rank]()

    def begin(who: int, members: Members) -> None:
        rank = Rank(members, net, schedule, launcher)
        ranks.append(rank)
        if newest and who < schedule.size:
            rank.load(newest[1])
        rank.train()

    net = Net(schedule.seed + start, {} if start else schedule.faults)
    launcher = Launcher(net, schedule.size, begin)
    if newest:
        launcher.newest = newest
    if not start:
        net.strikes, net.doomed = list(schedule.strikes), dict(schedule.doomed)
        for who, when_s in schedule.kills.items():
            net.after(when_s, partial(net.kill, who))
    for link in net.links(schedule.size):
        net.start(link.rank, partial(begin, link.rank, Members(link)))
    return net, launcher, ranks


def alone(schedule: Schedule) -> int:
    return _alone(schedule.way, schedule.samples)


@cache
def _alone(way: str, samples: int) -> int:
    """The checksum of the weights after all steps, by one rank."""
    net, done = Net(0, {}), list[Rank]()

    def train() -> None:
        done.append(Rank(Members(net.links(1)[0]), net, Schedule(0, 1, {}, way, samples)))
        done[0].train()

    net.start(0, train)
    net.run()
    return done[0].checksum()
