"""What has come, as numbers: rows put together, and packed messages unpacked by the thread that sees them arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract
from paceline.packing import unpack


def joined(parts: Sequence[Tensor]) -> Tensor:
    """All rows, one part after the other: where they lie so already, without copying them."""
    full = [part for part in parts if part.numel()]  # of an empty one nobody knows where it lies
    if not full:
        return parts[0]
    first, end = full[0], full[0].data_ptr()
    for part in full:
        whole = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (whole and part.data_ptr() == end and part.is_contiguous()):
            return torch.cat(full)
        end += part.nbytes
    return first.as_strided((sum(map(len, full)), *first.shape[1:]), first.stride())


class Added(contract.Handle):
    """What ``then`` makes of everyone's numbers, rank after rank."""

    def __init__(self, handle: contract.Handle, then: Callable[[list[Tensor]], Any]):
        self.handle, self.then = handle, then

    def done(self) -> bool:
        return self.handle.done()

    def wait(self, deadline_s: float | None = None) -> Any:
        return self.then(self.handle.wait(deadline_s))


class Gathered(Added):
    """The same of numbers that came packed; ``mine`` are those of ``rank`` itself, flat.

    ``num_bytes``: of the longest message, once all have come, which was at ``came_s`` by the clock ``now``.
    """

    def __init__(
        self,
        handle: contract.Handle,
        rank: int,
        mine: Tensor,
        then: Callable[[list[Tensor]], Any],
        now: Callable[[], float],
    ):
        super().__init__(handle, then)
        self.rank, self.mine, self.now = rank, mine, now
        self.num_bytes, self.came_s = 0, 0.0

    def wait(self, deadline_s: float | None = None) -> Any:
        parts = self.handle.wait(deadline_s)
        self.came_s = self.now()  # what follows is not the wire's
        self.num_bytes = max(len(part) for part in parts)
        mine = self.mine
        return self.then(
            [mine if rank == self.rank else unpack(part, mine.dtype).to(mine.device) for rank, part in enumerate(parts)]
        )
