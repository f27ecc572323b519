"""Where a forward pass can be cut, and how long each part of it takes: the cuts of a pipeline that nobody has named.

A place to cut is before a module that forward calls once, after at least one layer. Modules with no layer between them,
such as a block and its first layer, are one place.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


def computing(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that compute something themselves: with weights of their own, or with no modules inside."""
    for name, module in model.named_modules():
        if not any(module.children()) or any(True for _ in module.parameters(recurse=False)):
            yield name, module


class ForwardTimes:
    """One forward pass: when it calls each module, and how many layers it has called before."""

    def __init__(self) -> None:
        self.begins = defaultdict[str, list[float]](list)
        self.layers: dict[str, int] = {}  # that forward had called before this module
        self.span = 0.0, 0.0
        self._num_layers = 0

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        layers = {name for name, _ in computing(model)}
        hooks = [
            module.register_forward_pre_hook(partial(self._called, name, name in layers), prepend=True)
            for name, module in model.named_modules()
        ]
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.span = begin, time.perf_counter()
            for hook in hooks:
                hook.remove()

    def _called(self, name: str, layer: bool, *_: Any) -> None:
        self.begins[name].append(time.perf_counter())
        self.layers[name] = self._num_layers
        self._num_layers += layer

    def places(self) -> dict[str, float]:
        """The begin of the outermost module at each place, as a part of the pass, in the order of calls."""
        begin, end = self.span
        found = dict[int, tuple[str, float]]()
        for name, begins in self.begins.items():
            if name and len(begins) == 1 and self.layers[name]:
                found.setdefault(self.layers[name], (name, (begins[0] - begin) / (end - begin)))
        return dict(found.values())


def typical(passes: Sequence[ForwardTimes]) -> dict[str, float]:
    """The median of the passes, of the places that all of them have. The first one is slow."""
    each = [one.places() for one in passes]
    common = [name for name in each[0] if all(name in places for places in each)]
    return {name: statistics.median(places[name] for places in each[1:] or each) for name in common}


def even_cuts(begins: Mapping[str, float], num_stages: int, model: str) -> list[str]:
    """The places at which the stages take about as long. Raises ValueError where there are too few."""
    names, cuts = list(begins), list[str]()
    if len(names) < num_stages - 1:
        raise ValueError(
            f"a pipeline of {num_stages} stages cuts a model before {num_stages - 1} modules that forward calls once, "
            f"each after a layer of the stage before, and {model} has {len(names)}; use "
            f"{f'at most {len(names) + 1} stages, or ' if names else ''}another engine"
        )
    for stage in range(1, num_stages):
        first = names.index(cuts[-1]) + 1 if cuts else 0
        free = names[first : len(names) - (num_stages - 1 - stage)]  # the others are left to the stages after this
        cuts.append(min(free, key=lambda name: abs(begins[name] - stage / num_stages)))
    return cuts
