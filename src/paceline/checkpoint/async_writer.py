"""Asynchronous writer: a background thread writes one checkpoint after the other, while training continues.

The snapshot is copied to staging buffers in host memory, which are allocated once and reused.

*Cost*: one copy of all values for each snapshot; memory for one copy, which stays allocated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from paceline.errors import CheckpointError

TIMEOUT_S = 60.0
SLOWEST_BYTES_PER_S = 10e6  # a disk slower than this is an error


class Writer:
    """An error in the thread is raised once, by the next `finish`; the thread calls ``on_error`` at once."""

    def __init__(self, on_error: Callable[[], None]):
        self._on_error = on_error
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._description, self._limit_s = "", 0.0

    def begin(self, description: str, num_bytes: int, work: Callable[[], object]) -> None:
        """Call `finish` first. ``description`` names the checkpoint in the error of a timeout."""
        assert self._thread is None
        self._description, self._limit_s = description, TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S
        self._thread = threading.Thread(target=self._run, args=(work,), name="paceline writer", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error
            self._on_error()

    def finish(self) -> None:
        """Waits until the thread has ended. Raises the thread's error, and CheckpointError after the time limit."""
        if self._thread:
            self._thread.join(self._limit_s)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"{self._description} is not on the disk after {self._limit_s:.0f} s; earlier checkpoints are "
                    f"untouched; check whether the disk responds, or choose another folder"
                )
            self._thread = None
        error, self._error = self._error, None
        if error:
            raise error


Name = TypeVar("Name", bound=Hashable)


class StagingBuffers:
    """One buffer for each name; it is allocated again where dtype, shape or strides of the tensor have changed."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, tuple[object, Tensor]] = {}

    def stage(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        """Copies of the tensors, on the CPU. They overwrite the copies of the previous call."""
        previous, self._buffers = self._buffers, {}
        for name, tensor in tensors.items():
            layout = tensor.dtype, tensor.shape, tensor.stride()
            known_layout, buffer = previous.get(name, (None, None))
            if buffer is None or known_layout != layout:
                buffer = torch.empty_like(tensor.detach(), device="cpu")
            self._buffers[name] = layout, buffer.copy_(tensor.detach())
        return {name: self._buffers[name][1] for name in tensors}
