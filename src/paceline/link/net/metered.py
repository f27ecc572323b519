"""A link with byte counts: of all its lanes together, and with every operation reported to an observer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.messages import CommCost
from paceline.transport import Handle, Link


@dataclass(frozen=True)
class Transfer:
    """An operation that has begun. *Units*: ``begin_s`` on `time.perf_counter`; bytes sent by this rank."""

    lane: str
    operation: str
    what: str
    num_bytes: int
    begin_s: float
    handle: Handle


class MeteredLink(Link):
    """Forwards all to ``link``. The first lane's ``watch`` is called, from any thread, after an operation has begun.

    ``first``: the lane that this one was made from; ``spent``: bytes that earlier links of this rank have sent.
    """

    def __init__(self, link: Link, name: str = "control", first: MeteredLink | None = None, spent: int = 0):
        self.link, self.name = link, name
        self.rank, self.size, self.generation, self.hosts = link.rank, link.size, link.generation, link.hosts
        self.threads, self.accumulates_fp32, self.activity = link.threads, link.accumulates_fp32, link.activity
        self.watch: Callable[[Transfer], None] | None = None
        self._first, self._spent = first or self, spent
        self._lanes: list[Link] = []

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """Of this lane, of all lanes made from it, and of earlier links."""
        return self._spent + self.link.sent_bytes + sum(lane.sent_bytes for lane in self._lanes)

    def lane(self, name: str) -> Link:
        lane = MeteredLink(self.link.lane(name), name, self._first)
        self._lanes.append(lane)
        return lane

    def _metered(self, operation: str, what: str, tensor: Tensor, begin: Callable[[], Handle]) -> Handle:
        watch = self._first.watch
        if watch is None:
            return begin()
        begin_s, before = time.perf_counter(), self.link.sent_bytes
        handle = begin()
        # a sum made of point-to-point messages counts their bytes when each is sent, which is later
        counted = self.link.sent_bytes - before or int(self.link.cost(operation, tensor.nbytes).bytes)
        watch(Transfer(self.name, operation, what, counted, begin_s, handle))
        return handle

    def set_regime(self, high_bandwidth: bool) -> None:
        self.link.set_regime(high_bandwidth)

    def sum(self, tensor: Tensor, what: str = "sum") -> Handle:
        return self._metered("sum", what, tensor, lambda: self.link.sum(tensor, what))

    def max(self, tensor: Tensor, what: str = "max") -> Handle:
        return self._metered("max", what, tensor, lambda: self.link.max(tensor, what))

    def all_gather(self, tensor: Tensor, what: str = "all-gather", even: bool = False) -> Handle:
        return self._metered("all-gather", what, tensor, lambda: self.link.all_gather(tensor, what, even))

    def reduce_scatter(self, tensor: Tensor, what: str = "reduce-scatter") -> Handle:
        return self._metered("reduce-scatter", what, tensor, lambda: self.link.reduce_scatter(tensor, what))

    def shift(self, tensor: Tensor, what: str = "shift") -> Handle:
        return self._metered("shift", what, tensor, lambda: self.link.shift(tensor, what))

    def broadcast(self, tensor: Tensor, root: int = 0, what: str = "broadcast") -> Handle:
        return self._metered("broadcast", what, tensor, lambda: self.link.broadcast(tensor, root, what))

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Handle:
        return self._metered("send", f"to rank {peer}", tensor, lambda: self.link.send(tensor, peer, tag))

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Handle:
        return self._metered("recv", f"from rank {peer}", tensor, lambda: self.link.recv(tensor, peer, tag))

    def cost(self, operation: str, num_bytes: int) -> CommCost:
        return self.link.cost(operation, num_bytes)

    def abandon(self) -> None:
        self.link.abandon()

    def close(self) -> None:
        self.link.close()
