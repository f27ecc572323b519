"""Check in each step that layers and parameters are still those of the join: replaced ones are an error, by name.

*Cost*: each step compares the current entries of every module's tables with the earlier ones, in C: less than a tenth
of the time that calling the modules takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

TABLES, SHAPE = attrgetter("_parameters", "_modules"), attrgetter("shape")
MAX_NAMED = 3  # named in an error


class Layout:
    """The layers and parameters of a model at the time of construction."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._named = dict(_named(model))
        self._note()

    def _note(self) -> None:
        self._modules = list(self.model.modules())
        self._held = list(self._holds())
        self._tensors = [each for each in self.model.parameters() if each.layout == torch.strided]
        self._shapes = list(map(SHAPE, self._tensors))

    def _holds(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, chain.from_iterable(map(TABLES, self._modules))))

    def check(self) -> None:
        """Raises ValueError that names what has changed."""
        holds = list(self._holds())
        if len(holds) != len(self._held) or not all(map(is_, holds, self._held)):
            self._compare()
        if list(map(SHAPE, self._tensors)) != self._shapes:
            self._refuse(
                f"parameter {self._name(i)!r} has shape {tuple(each.shape)}, and had {tuple(self._shapes[i])}"
                for i, each in enumerate(self._tensors)
                if each.shape != self._shapes[i]
            )

    def _name(self, i: int) -> str:
        return next(name for name, each in self._named.items() if each is self._tensors[i])

    def _compare(self) -> None:
        """Accepts new names of known layers, and layers without values: these change no result."""
        current = dict(_named(self.model))
        old_ids, new_ids = ({id(each): name for name, each in one.items()} for one in (self._named, current))
        common = self._named.keys() & current.keys()
        faults = [
            f"{_kind(self._named[name])} {name!r} was replaced"
            for name in current
            if name in common and current[name] is not self._named[name]
        ]
        new = [name for name in current if name not in common and id(current[name]) not in old_ids]
        faults += [f"{_kind(current[name])} {name!r} is new" for name in new]
        removed = [name for name in self._named if name not in common and id(self._named[name]) not in new_ids]
        faults += [f"{_kind(self._named[name])} {name!r} was removed" for name in removed]
        if faults:
            self._refuse(iter(faults))
        self._named = current
        self._note()

    def _refuse(self, faults: Iterator[str]) -> None:
        found = list(faults)
        more = f", and {len(found) - MAX_NAMED} more like it" if len(found) > MAX_NAMED else ""
        raise ValueError(
            f"the model was changed after join(): {', '.join(found[:MAX_NAMED])}{more}; later "
            "changes are neither all-reduced nor copied: change the model and make its optimizer before join(), or "
            "close() and join again"
        )


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every layer with parameters or buffers of its own, and every parameter, by each of its names."""
    for name, module in model.named_modules(remove_duplicate=False):
        if any(each is not None for each in chain(module._parameters.values(), module._buffers.values())):
            yield name, module
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{name}.{key}".lstrip("."), parameter


def _kind(one: Any) -> str:
    return "parameter" if isinstance(one, Tensor) else f"layer ({type(one).__name__})"
