"""Collectives in a wrapper's own thread and connections, compressed without loss where the network is slower than that.

    large     sums and gathers in memory that the ranks of a machine share (`paceline.ddp.sums.hierarchical`)
    rate      of each large gather every rank knows the time per byte; what counts is the rank that waited least
    packed    set for all ranks alike, between two passes; on one machine never, where waits are those of its processors

*Cost*: a gather that is packed has one of the sizes before it. Sums are packed between two ranks only, where a gather
sends no more bytes.
*Invariants*: the same bits as without; every rank packs, or none.
*Source*: `codec/encoding/packing.py`.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed
from torch import Tensor

from paceline.codec.encoding.packing import MIN_BYTES, fits, pack, unpack
from paceline.ddp.sums import hierarchical
from paceline.exchange.flow.costs import SLOW_S

dist: Any = torch.distributed  # its stubs leave out what we use

P = ParamSpec("P")
Result = TypeVar("Result")

SPAN = 9  # gathers whose median counts
TIMED_BYTES = 1 << 16  # from here on latency is the smaller part of a slow network's time
PER_BYTE = 1e-12  # the unit of a rate, in seconds


class Lane:
    """Among the ranks of ``group``; every rank makes its own at the same place. ``name``: of those of this group its
    own. ``machines``: that of each rank, counted from 0. ``shares``: some are on one, and have large sums. ``beside``
    makes another one of the same ranks, for work in an order of its own."""

    _shared: hierarchical.Hierarchical | None = None

    def __init__(self, group: Any, store: Any, name: str, timeout: timedelta, machines: Sequence[int], shares: bool):
        self.rank, self.size, self.distant = dist.get_rank(group), dist.get_world_size(group), max(machines) > 0
        self.beside = partial(Lane, group, store, f"{name}/beside", timeout, machines, shares)
        prefix = dist.PrefixStore(f"paceline/ddp/lane/{name}", store)
        self._gloo = dist.ProcessGroupGloo(prefix, self.rank, self.size, timeout)
        self._shared = hierarchical.made(prefix, self.rank, machines, timeout) if shares else None
        self.packed = False
        self.last_s, self.last_bytes = 0.0, 0  # of the newest gather: its time, and what it received
        self._rates: deque[float] = deque(maxlen=SPAN)
        self._thread = ThreadPoolExecutor(1, "paceline ddp")

    def submit(self, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs) -> Future[Result]:
        """In the order of the calls, which is to be the same on every rank."""
        return self._thread.submit(work, *arguments, **options)

    @property
    def rate(self) -> int:
        """In units of PER_BYTE; 0: not known."""
        return round(statistics.median(self._rates) / PER_BYTE) if self._rates and self.distant else 0

    def slow(self, rate: int) -> bool:
        """Whether to pack from the next pass on, at the rate of the rank that waited least."""
        if not rate:
            return self.packed
        # hysteresis: packing ends only on a network that is twice as fast
        return rate * PER_BYTE >= SLOW_S / (2 if self.packed else 1)

    def packs(self, own: Tensor) -> bool:
        return self.packed and own.nbytes >= MIN_BYTES and own.is_floating_point() and fits(own)

    def packs_sum(self, own: Tensor) -> bool:
        return self.size == 2 and own.device.type == "cpu" and self.packs(own)

    def shares(self, own: Tensor) -> bool:
        return self._shared is not None and own.device.type == "cpu" and own.nbytes >= hierarchical.MIN_BYTES

    def gathered(self, own: Tensor) -> list[Tensor]:
        """Every rank's, which all have its shape."""
        if not self.packs(own):
            return self._gathered(own)
        payload = pack(own)
        sizes = [int(size) for size in self._gathered(torch.tensor([len(payload)]))]
        parts = self._gathered(torch.cat([payload, payload.new_zeros(max(sizes) - len(payload))]))
        return [
            own if rank == self.rank else unpack(part[:size], own.dtype).view_as(own)
            for rank, (part, size) in enumerate(zip(parts, sizes, strict=True))
        ]

    def gather(self, own: Tensor) -> tuple[list[Tensor], Any]:
        """Every rank's, once the work has been waited for."""
        each = [torch.empty_like(own) for _ in range(self.size)]
        return each, self._gloo.allgather([each], [own])

    def _gathered(self, own: Tensor) -> list[Tensor]:
        begin = time.perf_counter()
        if self._shared and self._shared.gathers and self.shares(own):
            each = self._shared.gather(own)
        else:
            each, work = self.gather(own)
            work.wait()
        self.last_s, self.last_bytes = time.perf_counter() - begin, (self.size - 1) * own.nbytes
        if self.last_bytes >= TIMED_BYTES:
            self._rates.append(self.last_s / self.last_bytes)
        return each

    def rows(self, own: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Of each matrix all ranks' rows, one rank's after the other's, padded with zeros to ``counts`` of them: these
        add nothing to a product."""
        flat = torch.cat([_padded(each, count) for each, count in zip(own, counts, strict=True)])
        everyone = self.gathered(flat)
        ends = accumulate((count * each.shape[1] for each, count in zip(own, counts, strict=True)), initial=0)
        return [
            torch.cat([each[start:end] for each in everyone]).view(-1, matrix.shape[1])
            for matrix, (start, end) in zip(own, pairwise(ends), strict=True)
        ]

    def add(self, own: Tensor) -> None:
        """Every rank's sum, in place."""
        if self.packs_sum(own):
            own.add_(self.gathered(own)[1 - self.rank])
        elif self._shared and self.shares(own):
            self._shared.add(own)
        else:
            self._gloo.allreduce([own]).wait()


def _padded(rows: Tensor, count: int) -> Tensor:
    flat = rows.reshape(-1)
    missing = count * rows.shape[1] - flat.numel()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
