"""State that forward changes: buffers, and frozen parameters (requires_grad=False), such as a momentum encoder's.

The first steps show it, by the tensors' values and torch's version counters. Values alone do not suffice: in the first
step a momentum encoder still equals its model, so its average changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.checks.norm_layers import over_batches
from paceline.exchange.flow.broadcast import mark

STEPS = 2
COMMON = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool
MAX_BYTES = 1 << 30  # of frozen parameters: up to here they are copied to see whether they change

Saved = Sequence[tuple[nn.Parameter, Tensor, Tensor]]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A GPU copies all that have a type by one kernel."""
    if not tensors:
        return []
    found = {i: each.clone() for i, each in enumerate(tensors) if not _is_common(each)}
    for kind in {(each.dtype, each.device) for i, each in enumerate(tensors) if i not in found}:
        alike = {i: t.detach() for i, t in enumerate(tensors) if i not in found and (t.dtype, t.device) == kind}
        numels = [each.numel() for each in alike.values()]
        parts = torch.split(torch.empty(sum(numels), dtype=kind[0], device=kind[1]), numels)
        views = [part.view(each.shape) for part, each in zip(parts, alike.values(), strict=True)]
        torch._foreach_copy_(views, list(alike.values()))
        found.update(zip(alike, views, strict=True))
    return [found[i] for i in range(len(tensors))]


def _is_common(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and tensor.dtype in COMMON and not tensor.is_nested


class Moving:
    """*Cost*: in the first steps a copy of these tensors; afterwards only of those that were ``found``."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        self.found: set[str] = set()
        self.differ: set[str] = set()  # tensors that have other values in another replica
        self.always = False  # looks for more in every step
        layers = over_batches(model).items()
        self.norms = {
            f"{where}.{name}".lstrip(".") for where, layer in layers for name in (*layer._buffers, *layer._parameters)
        }
        self.copies = sum(each.nbytes for each in self.frozen.values()) <= MAX_BYTES
        self._steps: set[int] = set()
        self._was: dict[str, tuple[Tensor, int, int, Tensor | None]] = {}

    @property
    def looks(self) -> bool:
        """Whether it still has to find out which tensors change."""
        return len(self._steps) < STEPS

    @property
    def others(self) -> set[str]:
        """The found tensors except the statistics of normalisation layers."""
        return self.found - self.norms

    def tensors(self) -> dict[str, Tensor]:
        """The current tensors: forward may replace a buffer."""
        return {**dict(self.model.named_buffers()), **self.frozen}

    def begin(self, step: int, present: bool = True) -> None:
        """Before the passes of a step. ``present``: this process has samples."""
        first = self.looks or step in self._steps
        self._was = {}
        if first:
            self._steps.add(step)
        if not present or not (first or self.always):
            return
        for name, each in self.tensors().items():
            copied = first and each.layout == torch.strided and (self.copies or name not in self.frozen)
            self._was[name] = (each, *mark(each), each.detach().clone() if copied else None)

    def end(self) -> None:
        if not self._was:
            return
        for name, each in self.tensors().items():
            tensor, version, place, copied = self._was.get(name, (None, 0, 0, None))
            marked = each is tensor and mark(each) == (version, place)
            if not marked or (copied is not None and not _same(each, copied)):
                self.found.add(name)
        self._was = {}

    def compare(self, others: Iterable[Mapping[str, Tensor]]) -> None:
        """With the values that other passes of the same step have given these tensors."""
        own = self.tensors()
        for its in others:
            both = (self.found & own.keys()) & its.keys()
            self.differ |= {name for name in both if not _same(own[name], its[name].to(own[name].device))}

    def of_frozen(self) -> list[nn.Parameter]:
        """The frozen parameters that change; until that is known, all of them, unless they are too large to copy."""
        if self.looks and self.copies:
            return list(self.frozen.values())
        return [each for name, each in self.frozen.items() if name in self.found] if self.frozen else []

    def keep(self) -> Saved:
        return [(each, each.data, each.detach().clone()) for each in self.of_frozen()]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restores these tensors afterwards, whatever forward (in an evaluation) has made of them."""
        saved = self.keep()
        buffers = [
            (module._buffers, name, each, mark(each), each.clone())
            for module in self.model.modules()
            for name, each in module._buffers.items()
            if each is not None and each.layout == torch.strided
        ]
        try:
            yield
        finally:
            self.put(saved)
            for table, name, each, marks, was in buffers:
                current = table.get(name)
                # a buffer that forward has replaced by one of another size is a cache: it stays
                if current is not None and current.shape == was.shape and (current is not each or mark(each) != marks):
                    table[name] = each.copy_(was)

    @staticmethod
    def put(saved: Saved) -> None:
        for each, data, was in saved:
            if each.data_ptr() != data.data_ptr():
                each.data = data
            data.copy_(was)


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit-equal; True for sparse tensors, which are not compared."""
    if one.layout != torch.strided:
        return True
    alike: Any = one.shape == other.shape and one.dtype == other.dtype
    return bool(alike) and torch.equal(_bytes(one), _bytes(other))


def _bytes(each: Tensor) -> Tensor:
    return each.detach().contiguous().reshape(-1).view(torch.uint8)
