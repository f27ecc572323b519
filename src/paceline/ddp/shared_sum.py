"""Sums over ranks of one machine in memory that they share: nothing passes through its network.

    chunk k     each rank writes its own; after a barrier it adds up a slice of all ranks'; after the next it reads all
    buffers     three: a rank may still read chunk k while another writes chunk k + 2

*Cost*: of each byte a write, a read of (size + 1) / size, and a copy; a barrier per chunk, and one more.
*Invariants*: each value is added up once, in the order of ranks, so all ranks have the same bits.
"""

from __future__ import annotations

import secrets
import weakref
from datetime import timedelta
from typing import Any

from torch import Tensor

from paceline.engine.node.local_group import LocalGroup
from paceline.engine.node.shared_memory import tensor_at
from paceline.report.activity import Activity

CHUNK_BYTES, BUFFERS = 4 << 20, 3
MIN_BYTES = 1 << 20  # fewer take as long by way of the network
DOING = "adding up gradients"


class SharedSum:
    """Among the ranks of ``local_group``."""

    def __init__(self, local_group: LocalGroup):
        self._group = local_group
        weakref.finalize(self, local_group.close)
        self._memory = local_group.shared_memory(BUFFERS * local_group.size * CHUNK_BYTES)
        self._next = 0  # buffer

    def add(self, own: Tensor) -> None:
        """Every rank's sum, in place, of a contiguous tensor that has the same shape on all. Raises LocalGroupError."""
        rank, size = self._group.rank, self._group.size
        before: tuple[Tensor, Tensor] | None = None
        for chunk in own.view(-1).split(CHUNK_BYTES // own.itemsize):  # type: ignore[no-untyped-call]
            slots = self._slots(chunk)
            slots[rank].copy_(chunk)
            self._group.barrier(DOING)
            if before:
                before[1].copy_(before[0])
            first, last = (len(chunk) * each // size for each in (rank, rank + 1))
            total = slots[0, first:last]
            for other in range(1, size):
                total.add_(slots[other, first:last])
            before = slots[0], chunk
        self._group.barrier(DOING)
        if before:
            before[1].copy_(before[0])

    def _slots(self, chunk: Tensor) -> Tensor:
        """*Shape*: (size, values of the chunk)."""
        start = self._next * self._group.size * CHUNK_BYTES
        self._next = (self._next + 1) % BUFFERS
        return tensor_at(self._memory, start, (self._group.size, len(chunk)), chunk.dtype)


def made(store: Any, rank: int, size: int, timeout: timedelta) -> SharedSum | None:
    """By all ranks at the same place; None, for all, where one of them cannot. ``store``: for this alone."""
    if rank == 0:
        store.set("name", secrets.token_hex(8))
    group, found = None, None
    try:
        group = LocalGroup(rank, size, f"ddp-{store.get('name').decode()}")
        # as in torch's own sums nobody is missed before, however long one of the ranks validates or is stopped
        group.failure_detector.patience_s = timeout.total_seconds()
        group.failure_detector.activity = Activity(timeout.total_seconds())
        found = SharedSum(group)
    except (OSError, RuntimeError, AttributeError):  # no memfd, or ranks in containers of their own
        if group:
            group.close()
    store.set(f"shares/{rank}", str(found is not None))
    everyone = [store.get(f"shares/{each}") == b"True" for each in range(size)]
    return found if all(everyone) else None
