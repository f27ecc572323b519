"""A step's batch as it was before: a model may change its input in place, and the step may be computed again.

A model's buffers, dense and sparse, for copying, restoring and broadcasting them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.compute.batch import leaves


class InputSnapshot:
    """Copies only until the first step has shown that the model leaves its inputs as they are."""

    def __init__(self) -> None:
        self._change: bool | None = None
        self._kept: list[tuple[Tensor, int, Tensor | None]] = []
        self._spoiled: set[tuple[int, int]] = set()

    def capture(self, batch: Any) -> None:
        """Raises ValueError for a batch that comes again, was changed as none before it was, and so was not copied."""
        self.drop()
        tensors = [leaf for leaf in leaves(batch) if not leaf.is_inference()]  # those have no version
        if self._spoiled and not self._spoiled.isdisjoint(map(_mark, tensors)):
            raise ValueError(
                "the model changed its input in place, which it had not in the steps before, and this step must be "
                "computed again on the input as it was; clone it in forward, or change it out of place"
            )
        self._spoiled = set()
        copy = self._change is not False
        self._kept = [(leaf, leaf._version, leaf.detach().clone() if copy else None) for leaf in tensors]

    def check(self) -> None:
        """After the passes."""
        changed = any(leaf._version != version for leaf, version, _ in self._kept)
        if self._kept:
            self._change = bool(self._change) or changed
        if not changed:
            self.drop()

    @torch.no_grad()
    def restore(self) -> None:
        for leaf, version, was in self._kept:
            if leaf._version != version and was is not None:
                leaf.copy_(was)
            elif leaf._version != version:
                self._change = True
                self._spoiled.add(_mark(leaf))
        self.drop()

    def drop(self) -> None:
        self._kept = []


def _mark(leaf: Tensor) -> tuple[int, int]:
    """What it holds: another slice of the same memory has its version, too."""
    return (leaf.untyped_storage().data_ptr(), leaf._version) if leaf.layout == torch.strided else (id(leaf), -1)


def solidify(model: nn.Module) -> None:
    """Gives each buffer that repeats one value (expanded) memory of its own, so that it can be written to."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.layout != torch.strided:
                continue
            if any(stride == 0 and n > 1 for stride, n in zip(buffer.stride(), buffer.shape, strict=True)):
                module._buffers[name] = buffer.contiguous()


def dense(model: nn.Module) -> list[Tensor]:
    return [each for each in model.buffers() if each.layout == torch.strided]


def sparse(model: nn.Module) -> dict[str, Tensor]:
    """In the COO layout; another is refused by `join`."""
    return {name: each for name, each in model.named_buffers() if each.layout == torch.sparse_coo}
