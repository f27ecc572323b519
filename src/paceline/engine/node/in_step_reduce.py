"""Small all-reduces within a step, over threads, processes and nodes: for synchronised batch norm.

    ThreadReduce  the replicas of one process, as threads
    InStepReduce  the processes of a node by sockets to local rank 0, and the nodes by its link

At the start of a step each process reports whether it has rows. A process without rows computes nothing: local rank 0
then only serves the others of its node, and a node without rows adds zeros until the others have ended. At the end
local rank 0 sends the sums to the processes without rows.

*Cost*: one message each way per process and sum; one vote per step; over nodes one more message per sum in
a step in which some node has no rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline import transport
from paceline.engine.node.local_group import TIMEOUT_S, LocalGroup, LocalGroupError

DOING = "adding up batch statistics"


class InStepReduce:
    """Sums over the processes of this node, and over the nodes through local rank 0's link."""

    def __init__(self, local_group: LocalGroup | None = None, link: transport.Link | None = None):
        self.local_group = local_group
        self.leads = local_group is None or local_group.rank == 0
        self._stale = False
        self._link(link)
        self.receive: Callable[[Tensor], None] = lambda vector: None
        self._inside = False
        self.waited_s = 0.0  # in all steps so far, for slower processes

    def _link(self, link: transport.Link | None) -> None:
        self.lane = link.lane("norm") if self.leads and link is not None and link.size > 1 else None

    def reopen(self, link: transport.Link | None) -> None:
        """Uses this link and new local sockets from the next step on: a failed step leaves messages in the old ones."""
        self._link(link)
        self._stale = True

    def inside(self) -> bool:
        return self._inside

    @contextmanager
    def step(self, present: bool) -> Iterator[None]:
        """One forward and backward of this process, or nothing if it has no rows. All must enter it."""
        try:
            with self._waiting():
                self._begin(present)
            self._inside = True
            try:
                yield
            finally:
                self._inside = False
            with self._waiting():
                self._end(present)
        except BaseException as error:
            if self.local_group:
                self.local_group.give_up(f"another process of this node failed in the step: {error}")
            raise

    def _begin(self, present: bool) -> None:
        if self._stale and self.local_group:
            self.local_group.close()
            detector = self.local_group.failure_detector
            self.local_group = LocalGroup(self.local_group.rank, self.local_group.size, f"{self.local_group.name}+")
            self.local_group.failure_detector = detector
        self._stale = False
        rows = self.local_group.gather([float(present)], DOING) if self.local_group else [[float(present)]]
        self._present = [rank for rank, (has_rows,) in enumerate(rows) if has_rows]
        self._absent = [rank for rank, (has_rows,) in enumerate(rows) if rank and not has_rows]
        self._sums: list[Tensor] = []
        if self.lane:
            nodes = self.lane.sum(torch.tensor([float(bool(self._present))], dtype=torch.float64), DOING).wait()
            self._all_nodes = float(nodes[0]) == self.lane.size

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - start

    def total(self, vector: Tensor) -> Tensor:
        with self._waiting():
            if not self.leads:
                assert self.local_group
                self.local_group.send_long(0, vector.numpy().tobytes(), b"n")
                return _numbers(self.local_group.recv_long(0, b"n", DOING))
            whole = self._serve(vector)
            assert whole is not None
            return whole

    def _serve(self, vector: Tensor | None) -> Tensor | None:
        """One sum, sent to the processes of this node that have rows; None when they have ended."""
        local_group, peers = self.local_group, [rank for rank in self._present if rank]
        parts = [] if vector is None else [vector]
        for peer in peers:
            assert local_group
            if vector is None and local_group.peek(peer) == b"e":
                local_group.recv(peer, DOING)
                continue
            parts.append(_numbers(local_group.recv_long(peer, b"n", DOING)))
        if not parts:
            return None
        if len({len(part) for part in parts}) > 1:
            raise LocalGroupError(
                "the processes of this node add up vectors of different lengths; their models took different paths"
            )
        whole = self._over_nodes(torch.stack(parts).sum(0) if len(parts) > 1 else parts[0].clone())
        for peer in peers:
            assert local_group
            assert whole is not None
            local_group.send_long(peer, whole.numpy().tobytes(), b"n")
        assert whole is not None
        self._keep(whole)
        return whole

    def _over_nodes(self, vector: Tensor | None) -> Tensor | None:
        """The sum over all nodes. Where a node has no rows, lengths are exchanged first: 0 means that it has ended."""
        if not self.lane:
            return vector
        longest = 0
        if not self._all_nodes:
            length = torch.tensor([0 if vector is None else len(vector)])
            longest = int(self.lane.max(length, DOING).wait()[0])
            if not longest:
                return None
        if vector is None:
            vector = torch.zeros(longest, dtype=torch.float64)
        whole: Tensor = self.lane.sum(vector, DOING).wait()
        return whole

    def _end(self, present: bool) -> None:
        if not self.leads:
            assert self.local_group
            if present and 0 not in self._present:
                self.local_group.send(0, b"e")
            while not present and self.local_group.peek(0) == b"n":
                self.receive(_numbers(self.local_group.recv_long(0, b"n", DOING)))
            if not present:
                self.local_group.expect(0, b"e", DOING)
            return
        if not present:
            while self._present and (vector := self._serve(None)) is not None:
                self.receive(vector)
        if self.lane and not self._all_nodes:
            while (vector := self._over_nodes(None)) is not None:
                if self._present:
                    raise LocalGroupError(
                        "batch_norm='sync': another node computes more batch-norm layers than this one"
                    )
                self.receive(vector)
                self._keep(vector)
        for peer in self._absent:
            assert self.local_group
            for vector in self._sums:
                self.local_group.send_long(peer, vector.numpy().tobytes(), b"n")
            self.local_group.send(peer, b"e")

    def _keep(self, vector: Tensor) -> None:
        if self._absent:
            self._sums.append(vector)

    def close(self) -> None:
        if self.local_group:
            self.local_group.close()


class ThreadReduce:
    """Sums over the threads of one process, then over all other processes by ``beyond``."""

    def __init__(self, beyond: Callable[[Tensor], Tensor]):
        self.beyond = beyond
        self.start(1)

    def start(self, num_threads: int) -> None:
        """Call it before each step. ``num_threads``: those with rows."""
        self._parts: dict[int, Tensor] = {}
        self._barrier = threading.Barrier(max(1, num_threads), self._add)

    def total(self, thread: int, vector: Tensor) -> Tensor:
        self._parts[thread] = vector
        try:
            self._barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise LocalGroupError("another replica failed in the middle of the step") from None
        return self._whole

    def _add(self) -> None:
        parts = [self._parts[thread] for thread in sorted(self._parts)]
        self._parts = {}
        self._whole = self.beyond(torch.stack(parts).sum(0) if len(parts) > 1 else parts[0])

    def give_up(self) -> None:
        self._barrier.abort()


def _numbers(body: bytes) -> Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.float64)
