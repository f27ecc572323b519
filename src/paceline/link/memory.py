"""Ranks as threads of one process, for tests and simulation: every collective without a network.

    collectives  each rank posts its tensor to every other rank; each of these reduces by itself
    membership   the survivors meet, and continue as the next generation without the ranks that did not come

A broadcast is complete for its root as soon as it has been sent, as on a network.
*Cost*: each rank's tensor is read once by every other: 1 step, (N - 1) n bytes per rank.
*Invariants*: sums are made in rank order, so all ranks get the same bits; a message that arrives twice counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import transport
from paceline.errors import LinkError
from paceline.messages import CommCost

TIMEOUT_S = 60.0

Key = tuple[str, int]  # a lane, and the number of a message on it


class Hub:
    """One generation: the messages that each rank was sent, and the failed ranks that each rank knows of.

    ``ids``: each rank's identity, the same in all generations. No message is delayed or dropped here.
    """

    patience_s = TIMEOUT_S

    def __init__(self, size: int, ids: Sequence[int] = (), threads: transport.Threads | None = None):
        self.size, self.ids = size, tuple(ids or range(size))
        self.threads = threads or transport.Threads()
        self.changed = [self.threads.Condition() for _ in range(size)]  # a rank's messages, or what it knows
        self.meeting = self.threads.Condition()
        self.inbox: dict[tuple[int, Key], dict[int, tuple[str, Tensor]]] = {}  # by receiver and message: by sender
        self.failed: list[dict[int, str]] = [{} for _ in range(size)]  # by the rank that knows it: rank to reason
        self.leaving: set[int] = set()  # to meet
        self.joined: set[int] = set()
        self.next: Hub | None = None
        self.joiners: tuple[transport.Joiner, ...] = ()  # its last ranks, which were not in the generation before

    def deliver(self, sender: int, lane: str, put: Callable[[int], None], receivers: Sequence[int]) -> None:
        """Calls ``put(receiver)`` for each receiver; the sender may be one."""
        for receiver in receivers:
            self.update(receiver, put)

    def update(self, receiver: int, put: Callable[[int], None]) -> None:
        with self.changed[receiver]:
            put(receiver)
            self.changed[receiver].notify_all()

    def kill(self, rank: int, why: str = "was killed") -> None:
        """From now on every wait that needs this rank fails."""

        def mark(receiver: int) -> None:
            self.failed[receiver].setdefault(rank, why)

        for receiver in range(self.size):
            self.update(receiver, mark)
        with self.meeting:
            self.meeting.notify_all()

    def leave(self, rank: int) -> None:
        """The rank's training is over: the others no longer wait for it."""
        self.kill(rank, "has left")

    def reconfigure(self, rank: int, admits: Sequence[transport.Joiner] = ()) -> tuple[Hub, int]:
        """(the next generation, this rank's rank in it). The generation forms once all ranks that are not known to
        have failed have come, or after a time-out. Raises LinkError for a rank that comes later."""
        self.leaving.add(rank)
        self.kill(rank, "has left for another generation")
        with self.meeting:
            self.joined.add(rank)
            self.meeting.notify_all()
            # twice: the last rank to come may itself have waited for patience_s before
            self.meeting.wait_for(lambda: self.next or self.complete(rank), 2 * self.patience_s)
            if self.next is None:
                self.next = Hub(len(self.joined), [self.ids[each] for each in sorted(self.joined)], self.threads)
                self.meeting.notify_all()
        if self.ids[rank] not in self.next.ids:
            raise LinkError(f"rank {rank} came too late: ranks {sorted(self.joined - {rank})} continued without it")
        return self.next, self.next.ids.index(self.ids[rank])

    def complete(self, rank: int) -> bool:
        known = self.failed[rank].keys() - self.leaving
        return all(each in self.joined or each in known for each in range(self.size))


class _Handle(transport.Handle):
    def __init__(self, link: Link, key: Key, senders: Sequence[int], take: Callable[[list[tuple[str, Tensor]]], Any]):
        self.link, self.place, self.senders, self._take = link, (link.rank, key), senders, take
        self.taken, self.result = False, None

    def done(self) -> bool:
        return self.taken or not self._missing()

    def _missing(self) -> list[int]:
        arrived = self.link.hub.inbox.get(self.place, {})
        return [rank for rank in self.senders if rank not in arrived]

    def _failed(self) -> list[int]:
        failed = self.link.hub.failed[self.link.rank]
        return [rank for rank in (self.link.rank, *self._missing()) if rank in failed] if failed else []

    def wait(self, deadline_s: float | None = None) -> Any:
        hub, rank = self.link.hub, self.link.rank
        limit_s = hub.patience_s if deadline_s is None else deadline_s
        with hub.changed[rank]:
            hub.changed[rank].wait_for(lambda: self.done() or self._failed(), limit_s)
            if not self.done():
                if failed := self._failed():
                    raise LinkError(f"rank {failed[-1]} {hub.failed[rank][failed[-1]]}", failed[-1])
                missing = self._missing()
                raise LinkError(f"waited in vain for ranks {missing}", missing[0])
            if not self.taken:
                arrived = hub.inbox.pop(self.place, {})
                self.taken, self.result = True, self._take([arrived[sender] for sender in self.senders])
        return self.result


class Link(transport.Link):
    """One rank's end. ``world(3)`` makes the links of three ranks."""

    networked = False

    def __init__(self, hub: Hub, rank: int, generation: int = 0, name: str = ""):
        self.hub, self.rank, self.size, self.generation, self.name = hub, rank, hub.size, generation, name
        self.threads = hub.threads
        self.hosts = [f"thread-{each}" for each in hub.ids]
        self.sequence = 0
        self._counts: dict[str, int] = {}

    def lane(self, name: str) -> Link:
        return Link(self.hub, self.rank, self.generation, f"{self.name}/{name}")

    def _post(self, key: Key, kind: str, tensor: Tensor, receivers: Sequence[int]) -> None:
        sent = tensor.detach().clone()

        def put(receiver: int) -> None:
            self.hub.inbox.setdefault((receiver, key), {})[self.rank] = kind, sent

        self.hub.deliver(self.rank, self.name, put, receivers)

    def _collective(
        self, kind: str, tensor: Tensor, combine: Callable[[list[Tensor]], Any], senders: Sequence[int] = ()
    ) -> _Handle:
        key, senders = (self.name, self.sequence), senders or range(self.size)
        self.sequence += 1
        self.sent_bytes += int(self.cost(kind, tensor.numel() * tensor.itemsize).bytes)
        if self.rank in senders:
            self._post(key, kind, tensor, range(self.size))

        def take(parts: list[tuple[str, Tensor]]) -> Any:
            requested = {k if k == "all-gather" else f"{k} of {tuple(t.shape)}" for k, t in parts}
            assert len(requested) == 1, f"ranks disagree on operation {key}: {sorted(requested)}"
            return combine([part for _, part in parts])

        return _Handle(self, key, senders, take)

    def sum(self, tensor: Tensor, what: str = "sum") -> transport.Handle:
        return self._collective("sum", tensor, lambda parts: tensor.copy_(_added(parts)))

    def max(self, tensor: Tensor, what: str = "max") -> transport.Handle:
        return self._collective("max", tensor, lambda parts: tensor.copy_(torch.stack(parts).amax(0)))

    def all_gather(self, tensor: Tensor, what: str = "all-gather", even: bool = False) -> transport.Handle:
        return self._collective("all-gather", tensor, lambda parts: [part.clone() for part in parts])

    def reduce_scatter(self, tensor: Tensor, what: str = "reduce-scatter") -> transport.Handle:
        return self._collective("reduce-scatter", tensor, lambda parts: _added(parts).chunk(self.size)[self.rank])

    def broadcast(self, tensor: Tensor, root: int = 0, what: str = "broadcast") -> transport.Handle:
        return self._collective("broadcast", tensor, lambda parts: tensor.copy_(parts[0]), (root,))

    def _number(self, route: str) -> Key:
        """The next message number on this route."""
        number = self._counts[route] = self._counts.get(route, -1) + 1
        return f"{self.name}: {route}", number

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> transport.Handle:
        self._post(self._number(f"{self.rank} to {peer}, tag {tag}"), "send", tensor, (peer,))
        self.sent_bytes += tensor.numel() * tensor.itemsize
        return _Handle(self, ("sent", 0), (), lambda _: tensor)  # no lane has such a name

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> transport.Handle:
        key = self._number(f"{peer} to {self.rank}, tag {tag}")
        return _Handle(self, key, (peer,), lambda parts: tensor.copy_(parts[0][1]))

    def cost(self, operation: str, num_bytes: int) -> CommCost:
        if operation in ("send", "recv", "shift"):
            return CommCost(1, 0 if operation == "recv" else num_bytes)
        return CommCost(1, num_bytes * (self.size - 1))

    def close(self) -> None:
        """The others no longer wait for this rank."""
        if not self.name:
            self.hub.leave(self.rank)


class Members(transport.Membership):
    """The surviving ranks of a hub. ``link``: of the current generation."""

    def __init__(self, link: Link):
        self.link: Link = link

    def stand_by(self, least: int = 1) -> None:
        pass

    def reconfigure(self, admits: Sequence[transport.Joiner] = ()) -> transport.View:
        before = self.link.hub
        hub, rank = before.reconfigure(self.link.rank, admits)
        self.link = Link(hub, rank, self.link.generation + 1)
        previous = tuple(before.ids.index(each) for each in hub.ids if each in before.ids)
        return transport.View(self.link, previous, hub.joiners)


def _added(parts: Sequence[Tensor]) -> Tensor:
    whole = parts[0].clone()
    for part in parts[1:]:
        whole += part
    return whole


def world(size: int, generation: int = 0) -> list[Link]:
    """One link per rank, all on one hub."""
    hub = Hub(size)
    return [Link(hub, rank, generation) for rank in range(size)]
