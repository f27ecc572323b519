"""The layers and parameters that joined are those that train: whatever was put in their place is an error, by name.

*Cost*: each step compares what every module's tables hold with what they held, in C: less than a tenth of what calling
the modules takes.
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
    """Of a model, as it is now."""

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
        """Raises ValueError, naming what is not as it was."""
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
        """New names for what was there, and layers that hold nothing, change no result."""
        now = dict(_named(self.model))
        known, there = ({id(each): name for name, each in one.items()} for one in (self._named, now))
        kept = self._named.keys() & now.keys()
        faults = [
            f"{_what(self._named[name])} {name!r} is another one now"
            for name in now
            if name in kept and now[name] is not self._named[name]
        ]
        faults += [
            f"{_what(now[name])} {name!r} is new" for name in now if name not in kept and id(now[name]) not in known
        ]
        gone = [name for name in self._named if name not in kept and id(self._named[name]) not in there]
        faults += [f"{_what(self._named[name])} {name!r} is gone" for name in gone]
        if faults:
            self._refuse(iter(faults))
        self._named = now
        self._note()

    def _refuse(self, faults: Iterator[str]) -> None:
        found = list(faults)
        more = f", and {len(found) - MAX_NAMED} more like it" if len(found) > MAX_NAMED else ""
        raise ValueError(
            f"the model was changed after join(): {', '.join(found[:MAX_NAMED])}{more}; what "
            "came later is neither all-reduced nor copied: change the model and make its optimizer before join(), or "
            "close() and join again"
        )


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every layer that holds values of its own, and every parameter, by each of its names."""
    for name, module in model.named_modules(remove_duplicate=False):
        if any(each is not None for each in chain(module._parameters.values(), module._buffers.values())):
            yield name, module
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{name}.{key}".lstrip("."), parameter


def _what(one: Any) -> str:
    return "parameter" if isinstance(one, Tensor) else f"layer ({type(one).__name__})"
