"""NCCL through torch.distributed for tensors on GPUs; gloo for the rest, and the same errors about failed peers.

*Cost*: as `link.gloo`: rings; NCCL chooses its own transport between the GPUs of a machine, and over the network.
*Invariants*: as `link.gloo`. The host polls with a deadline: NCCL's own wait only blocks the GPU's stream, and never
ends where a peer has failed.
Never run on a GPU; in the tests another gloo group on the CPU takes the place of NCCL's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from paceline.link import gloo as plain
from paceline.link.net.works import TIMEOUT_S
from paceline.registry import LINK

POLL_S = 5e-5  # short, since a step waits for several messages

dist: Any = torch.distributed  # its stubs leave out what we use


class Link(plain.Link):
    """One node's end, as `link.gloo`'s. Raises ValueError where torch has no NCCL, or sees no GPU."""

    carrier, by_all = "NCCL", True

    @staticmethod
    def check() -> None:
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise ValueError(
                f"PACELINE_LINK=nccl needs a GPU that torch sees, and a torch built with NCCL; this is torch "
                f"{torch.__version__} with {torch.cuda.device_count()} GPUs. Unset it, or use {LINK}"
            )

    def _connect(self, store: Any) -> Any:
        host = super()._connect(dist.PrefixStore("gloo", store))
        return Group(host, lambda: self._device_group(dist.PrefixStore("nccl", store)))

    def _device_group(self, store: Any) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def abandon(self) -> None:
        for group in self._groups:
            group.abandon()
        super().abandon()


class Group:
    """One lane: each operation runs on the group of the device of its tensors. ``make`` makes the GPU's group when it
    is first needed: a control lane never needs one."""

    def __init__(self, host: Any, make: Callable[[], Any], on_device: Callable[[Tensor], bool] = lambda t: t.is_cuda):
        self.host, self.make, self.on_device = host, make, on_device
        self.device: Any = None

    def _begin(self, tensor: Tensor, begin: Callable[[Any], Any]) -> Any:
        if not self.on_device(tensor):
            return begin(self.host)
        if self.device is None:
            self.device = self.make()
        return Work(begin(self.device))

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Any:
        return self._begin(tensors[0], lambda group: group.allreduce(tensors, options))

    def allgather(self, results: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> Any:
        return self._begin(tensors[0], lambda group: group.allgather(results, tensors))

    def alltoall_base(
        self, into: Tensor, out: Tensor, into_splits: Sequence[int], out_splits: Sequence[int], options: Any
    ) -> Any:
        return self._begin(out, lambda group: group.alltoall_base(into, out, into_splits, out_splits, options))

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Any:
        return self._begin(tensors[0], lambda group: group.broadcast(tensors, options))

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        return self._begin(tensors[0], lambda group: group.send(tensors, peer, tag))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        return self._begin(tensors[0], lambda group: group.recv(tensors, peer, tag))

    def abandon(self) -> None:
        """Aborts what is in progress on the GPU, so that its stream is free for the next group."""
        if self.device is not None:
            with contextlib.suppress(Exception):  # aborting a broken communicator may raise
                self.device.abort()


class Work:
    """An operation on the GPU, for which the host waits."""

    def __init__(self, work: Any):
        self.work = work

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError where it has not ended in time, or has failed."""
        end = time.monotonic() + timeout.total_seconds()
        while not self.work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError("not yet")
            time.sleep(POLL_S)
        self.work.wait()  # completed: raises its error, or makes this thread's stream wait for the result
