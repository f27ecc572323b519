"""State that forward changes: buffers, and parameters that do not train, such as a momentum encoder.

The first steps show it, by what the tensors hold and by torch's count of changes: an average of two encoders that are
still equal moves nothing in the first.
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
MAX_BYTES = 1 << 30  # of parameters that do not train, which may be copied to see whether they change

Kept = Sequence[tuple[nn.Parameter, Tensor, Tensor]]


class Moving:
    """*Cost*: in the first steps a copy of these tensors; afterwards nothing but for those that were ``found``."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        self.found: set[str] = set()
        self.differ: set[str] = set()  # which came out otherwise in another replica
        self.always = False  # looks for others in every step
        layers = over_batches(model).items()
        self.norms = {
            f"{where}.{name}".lstrip(".") for where, layer in layers for name in (*layer._buffers, *layer._parameters)
        }
        self.copies = sum(each.nbytes for each in self.frozen.values()) <= MAX_BYTES
        self._steps: set[int] = set()
        self._was: dict[str, tuple[Tensor, int, int, Tensor | None]] = {}

    @property
    def looks(self) -> bool:
        """Whether it is not known yet what changes."""
        return len(self._steps) < STEPS

    @property
    def others(self) -> set[str]:
        """Found, and not what a layer keeps of its batches to normalise by."""
        return self.found - self.norms

    def tensors(self) -> dict[str, Tensor]:
        """As they are now: forward may put another tensor in the place of a buffer."""
        return {**dict(self.model.named_buffers()), **self.frozen}

    def begin(self, step: int, here: bool = True) -> None:
        """Before the passes of a step. ``here``: there are samples to compute."""
        first = self.looks or step in self._steps
        self._was = {}
        if first:
            self._steps.add(step)
        if not here or not (first or self.always):
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
        """With what other passes over the same step have made of these tensors."""
        mine = self.tensors()
        for its in others:
            both = (self.found & mine.keys()) & its.keys()
            self.differ |= {name for name in both if not _same(mine[name], its[name].to(mine[name].device))}

    def of_frozen(self) -> list[nn.Parameter]:
        """Those that change, and as long as that is not known all that may be copied."""
        if self.looks and self.copies:
            return list(self.frozen.values())
        return [each for name, each in self.frozen.items() if name in self.found] if self.frozen else []

    def keep(self) -> Kept:
        return [(each, each.data, each.detach().clone()) for each in self.of_frozen()]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within, as in evaluation, forward may change these tensors; afterwards they are as before."""
        followed = self.keep()
        buffers = [
            (module._buffers, name, each, mark(each), each.clone())
            for module in self.model.modules()
            for name, each in module._buffers.items()
            if each is not None and each.layout == torch.strided
        ]
        try:
            yield
        finally:
            self.put(followed)
            for table, name, each, marks, was in buffers:
                now = table.get(name)
                # what forward makes anew in another size belongs to what it keeps elsewhere: a cache
                if now is not None and now.shape == was.shape and (now is not each or mark(each) != marks):
                    table[name] = each.copy_(was)

    @staticmethod
    def put(kept: Kept) -> None:
        for each, data, was in kept:
            if each.data_ptr() != data.data_ptr():
                each.data = data
            data.copy_(was)


def _same(one: Tensor, other: Tensor) -> bool:
    """In every bit."""
    if one.layout != torch.strided:
        return True
    alike: Any = one.shape == other.shape and one.dtype == other.dtype
    return bool(alike) and torch.equal(_bytes(one), _bytes(other))


def _bytes(each: Tensor) -> Tensor:
    return each.detach().contiguous().reshape(-1).view(torch.uint8)
