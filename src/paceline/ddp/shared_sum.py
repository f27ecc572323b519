"""Sums over ranks in memory that those of a machine share; over machines, one rank of each sums what they share.

    chunk k     each rank writes its own; after a barrier it adds up a slice of all ranks'; after the next, the first
                rank of a machine sums chunk k with those of the others, where there are several; after the one that
                follows, all read it
    buffers     four: a rank may still read chunk k while another writes chunk k + 3

*Cost*: of each byte a write, a read of (size + 1) / size, and a copy; a barrier per chunk, and one or two more. Between
m machines 2 (m - 1) / m of the bytes, however many ranks each has.
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
MIN_BYTES = 1 << 20  # fewer take as long by way of the network
DOING = "adding up gradients"


class SharedSum:
    """Among the ranks of ``local_group``; with those of other machines by ``machines``, of the first of each."""

    several = False  # machines
    machines: Any = None

    def __init__(self, local_group: LocalGroup):
        self._group = local_group
        weakref.finalize(self, local_group.close)
        self._memory = local_group.shared_memory(BUFFERS * local_group.size * CHUNK_BYTES)
        self._next = 0  # buffer

    def add(self, own: Tensor) -> None:
        """Every rank's sum, in place, of a contiguous tensor that has the same shape on all. Raises LocalGroupError;
        RuntimeError where another machine fails."""
        rank, size, behind = self._group.rank, self._group.size, 1 + self.several
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
            sent = self.machines.allreduce([sums[turn - 1]]) if self.machines and 0 < turn <= len(chunks) else None
            if turn >= behind:
                chunks[turn - behind].copy_(sums[turn - behind])
            if turn < len(chunks):
                first, last = (slots.shape[1] * each // size for each in (rank, rank + 1))
                total = slots[0, first:last]
                for other in range(1, size):
                    total.add_(slots[other, first:last])

    def _slots(self, chunk: Tensor) -> Tensor:
        """*Shape*: (size, values of the chunk)."""
        start = self._next * self._group.size * CHUNK_BYTES
        self._next = (self._next + 1) % BUFFERS
        return tensor_at(self._memory, start, (self._group.size, len(chunk)), chunk.dtype)


def made(store: Any, rank: int, machines: Sequence[int], timeout: timedelta) -> SharedSum | None:
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
        found = SharedSum(group)
    except (OSError, RuntimeError, AttributeError):  # no memfd, or ranks in containers of their own
        if group:
            group.close()
    store.set(f"shares/{rank}", str(found is not None))
    everyone = [store.get(f"shares/{each}") == b"True" for each in range(len(machines))]
    if found and all(everyone) and num_machines > 1:
        found.several = True
        if rank == ranks[0]:
            found.machines = dist.ProcessGroupGloo(dist.PrefixStore("machines", store), mine, num_machines, timeout)
    return found if all(everyone) else None
