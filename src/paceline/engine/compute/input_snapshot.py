"""Snapshot of a step's batch: a model may change its input in place, and the step may be computed again.

Also the model's buffers, dense and sparse, for copying, restoring and broadcasting them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.compute.batch import leaves


class InputSnapshot:
    """Copies the batch only until the first step has shown that the model does not change it."""

    def __init__(self) -> None:
        self._change: bool | None = None
        self._saved: list[tuple[Tensor, int, Tensor | None]] = []
        self._overwritten: set[tuple[int, int]] = set()

    def capture(self, batch: Any) -> None:
        """Raises ValueError for the batch of a retry that the model has overwritten, and of which there is no copy."""
        self.drop()
        tensors = [leaf for leaf in leaves(batch) if not leaf.is_inference()]  # inference tensors have no version
        if self._overwritten and not self._overwritten.isdisjoint(map(_mark, tensors)):
            raise ValueError(
                "the model changed its input in place, which it had not done in the steps before, and this step must "
                "be computed again on the original input; clone it in forward, or change it out of place"
            )
        self._overwritten = set()
        copy = self._change is not False
        self._saved = [(leaf, leaf._version, leaf.detach().clone() if copy else None) for leaf in tensors]

    def check(self) -> None:
        """Call it after the passes: notes whether the model has changed its input."""
        changed = any(leaf._version != version for leaf, version, _ in self._saved)
        if self._saved:
            self._change = bool(self._change) or changed
        if not changed:
            self.drop()

    @torch.no_grad()
    def restore(self) -> None:
        for leaf, version, was in self._saved:
            if leaf._version != version and was is not None:
                leaf.copy_(was)
            elif leaf._version != version:
                self._change = True
                self._overwritten.add(_mark(leaf))
        self.drop()

    def drop(self) -> None:
        self._saved = []


def _mark(leaf: Tensor) -> tuple[int, int]:
    """(address, version): slices of the same memory share both."""
    return (leaf.untyped_storage().data_ptr(), leaf._version) if leaf.layout == torch.strided else (id(leaf), -1)


def solidify(model: nn.Module) -> None:
    """Makes expanded buffers (stride 0) contiguous, so that they can be written to."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.layout != torch.strided:
                continue
            if any(stride == 0 and n > 1 for stride, n in zip(buffer.stride(), buffer.shape, strict=True)):
                module._buffers[name] = buffer.contiguous()


def dense(model: nn.Module) -> list[Tensor]:
    return [each for each in model.buffers() if each.layout == torch.strided]


def sparse(model: nn.Module) -> dict[str, Tensor]:
    """Buffers in the COO layout; `join` refuses other sparse layouts."""
    return {name: each for name, each in model.named_buffers() if each.layout == torch.sparse_coo}
