"""Ranks as threads of one process, for tests and simulation: every collective without a network.

*Cost*: each rank's tensor is read once by every other: 1 step, (N - 1) n bytes per rank.
*Laws*: sums are made in rank order by one thread, so all ranks get the same bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.contract import Cost, LinkError

PATIENCE_S = 60.0


class Hub:
    """What the threads share: deposits by (lane, sequence number), mail by (lane, from, to, tag)."""

    def __init__(self, size: int):
        self.size = size
        self.changed = threading.Condition()
        self.slots: dict[tuple[str, int], dict[int, tuple[str, Tensor]]] = {}
        self.results: dict[tuple[str, int], Any] = {}
        self.readers: dict[tuple[str, int], int] = {}
        self.mail: dict[tuple[str, int, int, int], list[Tensor]] = {}
        self.dead: dict[int, str] = {}
        self.again: set[int] = set()  # who has come to form the next generation
        self.next: tuple[Hub, tuple[int, ...]] | None = None

    def kill(self, rank: int, why: str = "was killed") -> None:
        """From now on every wait that needs this rank fails."""
        with self.changed:
            self.dead[rank] = why
            self.changed.notify_all()


class _Handle(contract.Handle):
    def __init__(self, hub: Hub, ready: Callable[[], bool], take: Callable[[], Any], missing: Callable[[], Any]):
        self.hub, self.ready, self.take, self.missing = hub, ready, take, missing
        self.taken, self.result = False, None

    def done(self) -> bool:
        return self.taken or self.ready()

    def wait(self, deadline_s: float | None = None) -> Any:
        end = time.monotonic() + (PATIENCE_S if deadline_s is None else deadline_s)
        with self.hub.changed:
            while not self.done():
                gone = [rank for rank in self.missing() if rank in self.hub.dead or rank in self.hub.again]
                if gone:
                    how = self.hub.dead.get(gone[0], "has given this link up")
                    raise LinkError(f"rank {gone[0]} {how}", gone[0])
                if not self.hub.changed.wait(end - time.monotonic()):
                    raise LinkError(f"waited in vain for ranks {self.missing()}", next(iter(self.missing()), None))
            if not self.taken:
                self.taken, self.result = True, self.take()
        return self.result


class Link(contract.Link):
    """One rank's end. ``world(3)`` makes three that belong together."""

    def __init__(self, hub: Hub, rank: int, generation: int = 0, name: str = ""):
        self.hub, self.rank, self.size, self.generation, self.name = hub, rank, hub.size, generation, name
        self.hosts = [f"thread-{r}" for r in range(hub.size)]
        self.sequence = 0

    def lane(self, name: str) -> Link:
        return Link(self.hub, self.rank, self.generation, f"{self.name}/{name}")

    def _collective(self, kind: str, tensor: Tensor, combine: Callable[[list[Tensor]], Any]) -> _Handle:
        hub, key = self.hub, (self.name, self.sequence)
        self.sequence += 1
        with hub.changed:
            slot = hub.slots.setdefault(key, {})
            slot[self.rank] = (kind, tensor)
            if len(slot) == hub.size:
                asked = {k if k == "all-gather" else f"{k} of {tuple(t.shape)}" for k, t in slot.values()}
                assert len(asked) == 1, f"ranks disagree on operation {key}: {sorted(asked)}"
                hub.results[key] = combine([slot[r][1] for r in range(hub.size)])
            hub.changed.notify_all()

        def take() -> Any:
            result = hub.results[key]
            hub.readers[key] = hub.readers.get(key, 0) + 1
            if hub.readers[key] == hub.size:
                del hub.slots[key], hub.results[key], hub.readers[key]
            return result

        def missing() -> list[int]:
            return [r for r in range(hub.size) if r not in hub.slots.get(key, {})]

        self.sent_bytes += int(self.cost(kind, tensor.numel() * tensor.itemsize).bytes)
        return _Handle(hub, lambda: key in hub.results, take, missing)

    def sum(self, tensor: Tensor, what: str = "sum") -> contract.Handle:
        def combine(parts: list[Tensor]) -> Tensor:
            whole = parts[0].clone()
            for part in parts[1:]:
                whole += part
            return whole

        return _Own(self._collective("sum", tensor, combine), tensor.copy_)

    def max(self, tensor: Tensor, what: str = "max") -> contract.Handle:
        handle = self._collective("max", tensor, lambda parts: torch.stack(parts).amax(0))
        return _Own(handle, tensor.copy_)

    def all_gather(self, tensor: Tensor, what: str = "all-gather", even: bool = False) -> contract.Handle:
        handle = self._collective("all-gather", tensor, lambda parts: [part.clone() for part in parts])
        return _Own(handle, lambda parts: [part.clone() for part in parts])

    def reduce_scatter(self, tensor: Tensor, what: str = "reduce-scatter") -> contract.Handle:
        def combine(parts: list[Tensor]) -> list[Tensor]:
            whole = parts[0].clone()
            for part in parts[1:]:
                whole += part
            return list(whole.chunk(self.size)) if self.size > 1 else [whole]

        return _Own(self._collective("reduce-scatter", tensor, combine), lambda parts: parts[self.rank])

    def broadcast(self, tensor: Tensor, root: int = 0, what: str = "broadcast") -> contract.Handle:
        return _Own(self._collective("broadcast", tensor, lambda parts: parts[root].clone()), tensor.copy_)

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> contract.Handle:
        with self.hub.changed:
            self.hub.mail.setdefault((self.name, self.rank, peer, tag), []).append(tensor.clone())
            self.hub.changed.notify_all()
        self.sent_bytes += tensor.numel() * tensor.itemsize
        return _Handle(self.hub, lambda: True, lambda: tensor, list)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> contract.Handle:
        box = (self.name, peer, self.rank, tag)

        def take() -> Tensor:
            return tensor.copy_(self.hub.mail[box].pop(0))

        return _Handle(self.hub, lambda: bool(self.hub.mail.get(box)), take, lambda: [peer])

    def stand_by(self, least: int = 1) -> None:
        pass

    def rebuild(self) -> Link:
        hub = self.hub
        with hub.changed:
            hub.again.add(self.rank)
            hub.changed.notify_all()
            if not hub.changed.wait_for(lambda: len(hub.again | hub.dead.keys()) == hub.size, PATIENCE_S):
                raise LinkError(f"only ranks {sorted(hub.again)} of {hub.size} came again")
            if hub.next is None:
                left = tuple(sorted(hub.again - hub.dead.keys()))
                hub.next = Hub(len(left)), left
        after, origin = hub.next
        link = Link(after, origin.index(self.rank), self.generation + 1)
        link.origin = origin
        return link

    def cost(self, operation: str, num_bytes: int) -> Cost:
        if operation in ("send", "recv"):
            return Cost(1, num_bytes if operation == "send" else 0)
        return Cost(1, num_bytes * (self.size - 1))


class _Own(contract.Handle):
    """A collective's result, made this rank's own."""

    def __init__(self, handle: _Handle, own: Callable[[Any], Any]):
        self.handle, self.own = handle, own

    def done(self) -> bool:
        return self.handle.done()

    def wait(self, deadline_s: float | None = None) -> Any:
        return self.own(self.handle.wait(deadline_s))


def world(size: int, generation: int = 0) -> list[Link]:
    """One link per rank, all on one hub."""
    hub = Hub(size)
    return [Link(hub, rank, generation) for rank in range(size)]
