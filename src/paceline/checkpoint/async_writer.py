"""Asynchronous writer: a background thread writes one checkpoint after the other, while training continues.

Host memory for tensors, taken once and used again, so that a snapshot costs a copy and no new memory.

*Cost*: one pass over the values; memory for all of them, which stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from paceline.errors import CheckpointError

TIMEOUT_S = 60.0
SLOWEST_BYTES_PER_S = 10e6  # of a disk that is still waited for


class Writer:
    """What goes wrong in the thread is raised once, by the next `finish`; ``failed`` is called there at once."""

    def __init__(self, failed: Callable[[], None]):
        self._failed = failed
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._what, self._limit_s = "", 0.0

    def begin(self, what: str, num_bytes: int, work: Callable[[], object]) -> None:
        """Only after `finish`. ``what`` is for the message of a disk that never ends."""
        assert self._thread is None
        self._what, self._limit_s = what, TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S
        self._thread = threading.Thread(target=self._run, args=(work,), name="paceline writer", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error
            self._failed()

    def finish(self) -> None:
        """Nothing is being written any more. Raises CheckpointError, also for a disk that is too slow."""
        if self._thread:
            self._thread.join(self._limit_s)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"{self._what} is not on the disk after {self._limit_s:.0f} s; what was there before is untouched; "
                    f"look whether the disk answers, or choose another folder"
                )
            self._thread = None
        error, self._error = self._error, None
        if error:
            raise error


Name = TypeVar("Name", bound=Hashable)


class StagingBuffers:
    """Each name has a place, as long as its tensor keeps type, shape and layout."""

    def __init__(self) -> None:
        self._places: dict[Hashable, tuple[object, Tensor]] = {}

    def of(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        """The tensors as they are now, on the CPU, where the result before this one was."""
        before, self._places = self._places, {}
        for name, tensor in tensors.items():
            form = tensor.dtype, tensor.shape, tensor.stride()
            known, place = before.get(name, (None, None))
            if place is None or known != form:
                place = torch.empty_like(tensor.detach(), device="cpu")
            self._places[name] = form, place.copy_(tensor.detach())
        return {name: self._places[name][1] for name in tensors}
