"""A link whose all-reduce is replaced by an algorithm of `collectives/`.

The sums of one lane run one after another, in the order of the calls, each in its own thread.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from paceline.errors import LinkError
from paceline.link.net.collective_run import Collective, names
from paceline.messages import CommCost
from paceline.transport import Handle, Link


def agree_on(link: Link, name: str) -> None:
    """Raises ValueError on every rank where the ranks name different algorithms: their messages would not match."""
    known = "", *names()
    own = torch.tensor([known.index(name)])
    requested = [known[int(part)] for part in link.all_gather(own, "the choice of a collective", even=True).wait()]
    if len(set(requested)) > 1:
        pairs = zip(requested, link.hosts, strict=True)
        listed = ", ".join(f"{one!r} on {host}" if one else f"not set on {host}" for one, host in pairs)
        raise ValueError(f"PACELINE_COLLECTIVE is {listed}; all nodes need the same: set it alike on all")


def override(link: Link, name: str) -> Link:
    """``link`` with its sums by the algorithm of that name; for "" the link itself."""
    return CollectiveOverride(link, Collective(name)) if name else link


class CollectiveOverride(Link):
    """``link`` with its `sum` by ``collective``; all other operations are the link's own."""

    def __init__(self, link: Link, collective: Collective):
        self.link, self.collective = link, collective
        self.rank, self.size, self.generation, self.hosts = link.rank, link.size, link.generation, link.hosts
        self.activity = link.activity
        self._last: _Sum | None = None

    @property
    def sent_bytes(self) -> int:
        return self.link.sent_bytes

    @sent_bytes.setter
    def sent_bytes(self, count: int) -> None:
        self.link.sent_bytes = count

    def lane(self, name: str) -> Link:
        return CollectiveOverride(self.link.lane(name), self.collective)

    def set_regime(self, high_bandwidth: bool) -> None:
        self.link.set_regime(high_bandwidth)

    def sum(self, tensor: Tensor, what: str = "sum") -> Handle:
        self._last = _Sum(self, tensor, what, self._last)
        return self._last

    def max(self, tensor: Tensor, what: str = "max") -> Handle:
        return self.link.max(tensor, what)

    def all_gather(self, tensor: Tensor, what: str = "all-gather", even: bool = False) -> Handle:
        return self.link.all_gather(tensor, what, even)

    def reduce_scatter(self, tensor: Tensor, what: str = "reduce-scatter") -> Handle:
        return self.link.reduce_scatter(tensor, what)

    def shift(self, tensor: Tensor, what: str = "shift") -> Handle:
        return self.link.shift(tensor, what)

    def broadcast(self, tensor: Tensor, root: int = 0, what: str = "broadcast") -> Handle:
        return self.link.broadcast(tensor, root, what)

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Handle:
        return self.link.send(tensor, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Handle:
        return self.link.recv(tensor, peer, tag)

    def cost(self, operation: str, num_bytes: int) -> CommCost:
        if operation != "sum":
            return self.link.cost(operation, num_bytes)
        itemsize = next(size for size in (4, 2, 1) if num_bytes % size == 0)
        return self.collective.cost(self.size, num_bytes, itemsize, tuple(self.hosts))

    def abandon(self) -> None:
        self.link.abandon()

    def close(self) -> None:
        self.link.close()


class _Sum(Handle):
    """A sum in flight; it starts after the previous sum of the same lane."""

    def __init__(self, link: CollectiveOverride, tensor: Tensor, what: str, before: _Sum | None):
        self.tensor, self.what = tensor, what
        self.error: Exception | None = None
        self.finished = threading.Event()
        threading.Thread(target=self._run, args=(link, before), name="paceline sum", daemon=True).start()

    def _run(self, link: CollectiveOverride, before: _Sum | None) -> None:
        try:
            if before:
                before.wait()
            self._add_up(link)
        except Exception as error:
            self.error = error
        finally:
            self.finished.set()

    def _add_up(self, link: CollectiveOverride) -> None:
        try:
            link.collective.run(link.link, self.tensor)
        except LinkError as error:
            raise LinkError(f"{error} (a message of {self.what})", error.peer) from error

    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self, deadline_s: float | None = None) -> Any:
        if not self.finished.wait(deadline_s):
            raise LinkError(f"gave up on {self.what} after {deadline_s:.0f} s: it is still in progress")
        if self.error:
            raise self.error
        return self.tensor
