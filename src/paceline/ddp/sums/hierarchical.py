"""Hierarchical collectives: within a machine in memory that its ranks share; between, one rank of each sends for all.

    chunk k     each rank writes its own; after a barrier it adds up a slice of all ranks'; after the next, the first
                rank of a machine sums chunk k with those of the others, where there are several; after the one that
                follows, all read it
    buffers     four: a rank may still read chunk k while another writes chunk k + 3
    a gather    is a chunk behind, not two: what ranks write is sent as it is

*Cost*: of each byte a write, a read of (size + 1) / size, and a copy; a barrier per chunk, and one or two more. Between
m machines 2 (m - 1) / m of the bytes of a sum, however many ranks each has; and of a gather those of other machines.
*Invariants*: each value is added up once, a machine's in the order of its ranks, so all ranks have the same bits.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from paceline.engine.node.local_group import LocalGroup
from paceline.engine.node.shared_memory import tensor_at
from paceline.report.activity import Activity

dist: Any = torch.distributed  # its stubs leave out what we use

CHUNK_BYTES, BUFFERS = 4 << 20, 4
GATHERED_BYTES, GATHER_BUFFERS = 1 << 20, 3  # of each rank
MIN_BYTES = 1 << 20  # fewer take as long by way of the network
DOING = "adding up gradients"


class Hierarchical:
    """Among the ranks of ``local_group``; with those of other machines by ``between``, of the first of each.
    ``machines``: of all ranks, this one of which is ``rank``."""

    between: Any = None

    def __init__(self, local_group: LocalGroup, rank: int, machines: Sequence[int]):
        self._group, self._rank, self._machines = local_group, rank, machines
        weakref.finalize(self, local_group.close)
        self._gathered_from = BUFFERS * local_group.size * CHUNK_BYTES
        num_bytes = GATHER_BUFFERS * len(machines) * GATHERED_BYTES
        self._memory = local_group.shared_memory(self._gathered_from + num_bytes)
        self._next = self._next_gathered = 0  # buffer
        sizes = {machines.count(each) for each in machines}
        self.gathers = len(sizes) == 1 and list(machines) == sorted(machines)  # a machine's part is of one piece

    def add(self, own: Tensor) -> None:
        """Every rank's sum, in place, of a contiguous tensor that has the same shape on all. Raises LocalGroupError;
        RuntimeError where another machine fails."""
        rank, size, behind = self._group.rank, self._group.size, 1 + (max(self._machines) > 0)
        chunks = list(own.view(-1).split(CHUNK_BYTES // own.itemsize))  # type: ignore[no-untyped-call]
        sums, sent = list[Tensor](), None
        for turn in range(len(chunks) + behind):
            if turn < len(chunks):
                slots = self._slots(chunks[turn])
                slots[rank].copy_(chunks[turn])
                sums.append(slots[0])
            if sent:
                sent.wait()
            self._group.barrier(DOING)
            sent = self.between.allreduce([sums[turn - 1]]) if self.between and 0 < turn <= len(chunks) else None
            if turn >= behind:
                chunks[turn - behind].copy_(sums[turn - behind])
            if turn < len(chunks):
                first, last = (slots.shape[1] * each // size for each in (rank, rank + 1))
                total = slots[0, first:last]
                for other in range(1, size):
                    total.add_(slots[other, first:last])

    def gather(self, own: Tensor) -> list[Tensor]:
        """Every rank's, in their order, which all have its shape. Raises as `add`. Only where this `gathers`."""
        width = GATHERED_BYTES // own.itemsize
        everyone = [torch.empty_like(own) for _ in self._machines]
        parts = list(zip(*(each.view(-1).split(width) for each in everyone), strict=True))  # type: ignore[no-untyped-call]
        chunks, sent = own.reshape(-1).split(width), None  # type: ignore[no-untyped-call]
        before = own
        for turn in range(len(chunks) + 1):
            if turn < len(chunks):
                slots = self._all_slots(chunks[turn])
                slots[self._rank].copy_(chunks[turn])
            if sent:
                sent.wait()
            self._group.barrier(DOING)
            if self.between and turn < len(chunks):
                machines = slots.split(self._group.size)  # type: ignore[no-untyped-call]
                sent = self.between.allgather([list(machines)], [machines[self._machines[self._rank]].clone()])
            for part, value in zip(parts[turn - 1], before, strict=True) if turn else ():
                part.copy_(value)
            before = slots
        return everyone

    def _all_slots(self, chunk: Tensor) -> Tensor:
        """*Shape*: (ranks of all machines, values of the chunk)."""
        start = self._gathered_from + self._next_gathered * len(self._machines) * GATHERED_BYTES
        self._next_gathered = (self._next_gathered + 1) % GATHER_BUFFERS
        return tensor_at(self._memory, start, (len(self._machines), len(chunk)), chunk.dtype)

    def _slots(self, chunk: Tensor) -> Tensor:
        """*Shape*: (size, values of the chunk)."""
        start = self._next * self._group.size * CHUNK_BYTES
        self._next = (self._next + 1) % BUFFERS
        return tensor_at(self._memory, start, (self._group.size, len(chunk)), chunk.dtype)


def made(store: Any, rank: int, machines: Sequence[int], timeout: timedelta) -> Hierarchical | None:
    """By all ranks at the same place; None, for all, where one of them cannot. ``store``: for this alone. ``machines``:
    the machine of each rank, counted from 0."""
    mine, num_machines = machines[rank], max(machines) + 1
    ranks = [other for other, machine in enumerate(machines) if machine == mine]
    if rank == ranks[0]:
        store.set(f"name/{mine}", secrets.token_hex(8))
    group, found = None, None
    try:
        group = LocalGroup(ranks.index(rank), len(ranks), f"ddp-{store.get(f'name/{mine}').decode()}")
        # as in torch's own sums nobody is missed before, however long one of the ranks validates or is stopped
        group.failure_detector.patience_s = timeout.total_seconds()
        group.failure_detector.activity = Activity(timeout.total_seconds())
        found = Hierarchical(group, rank, machines)
    except (OSError, RuntimeError, AttributeError):  # no memfd, or ranks in containers of their own
        if group:
            group.close()
    store.set(f"shares/{rank}", str(found is not None))
    everyone = [store.get(f"shares/{each}") == b"True" for each in range(len(machines))]
    if found and all(everyone) and num_machines > 1 and rank == ranks[0]:
        found.between = dist.ProcessGroupGloo(dist.PrefixStore("machines", store), mine, num_machines, timeout)
    return found if all(everyone) else None
