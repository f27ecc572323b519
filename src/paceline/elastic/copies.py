"""Host memory for tensors, taken once and used again, so that a snapshot costs a copy and no new memory.

*Cost*: one pass over the values; memory for all of them, which stays.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name", bound=Hashable)


class Copies:
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
