"""Where a model can be cut, and how long the passes of each part take: the cuts of a pipeline that nobody has named.

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

from torch import Tensor, nn

from paceline.engine.compute.batch import leaves

TIE = 0.02  # of both passes: two timings of the same step differ by as much


def computing(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that compute something themselves: with weights of their own, or with no modules inside."""
    for name, module in model.named_modules():
        if not any(module.children()) or any(True for _ in module.parameters(recurse=False)):
            yield name, module


class PassTimes:
    """One forward pass: when it calls each module, and how many layers it has called before. Of the backward pass after
    it: when the gradient of each module's input is known."""

    def __init__(self) -> None:
        self.begins = defaultdict[str, list[float]](list)
        self.known: dict[str, float] = {}
        self.layers: dict[str, int] = {}  # that forward had called before this module
        self.span = 0.0, 0.0
        self._num_layers = 0

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        layers = {name for name, _ in computing(model)}
        hooks = []
        for name, module in model.named_modules():
            called = partial(self._called, name, name in layers)
            hooks.append(module.register_forward_pre_hook(called, prepend=True, with_kwargs=True))
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.span = begin, time.perf_counter()
            for hook in hooks:
                hook.remove()

    def _called(self, name: str, layer: bool, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self.layers[name] = self._num_layers
        self._num_layers += layer
        for tensor in leaves((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._reached, name))  # type: ignore[no-untyped-call]
        self.begins[name].append(time.perf_counter())

    def _reached(self, name: str, _gradient: Tensor) -> None:
        self.known[name] = time.perf_counter()

    def places(self, end: float = 0.0) -> dict[str, float]:
        """The outermost module at each place, in the order of calls: what is computed before it, as a part of both
        passes, of which backward has ended at ``end``; without it, of forward."""
        begin, forward_end = self.span
        end = max(end, forward_end)
        found = dict[int, tuple[str, float]]()
        for name, begins in self.begins.items():
            if name and len(begins) == 1 and self.layers[name]:
                before_s = begins[0] - begin + end - self.known.get(name, end)
                found.setdefault(self.layers[name], (name, before_s / (end - begin)))
        return dict(found.values())


def typical(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of the passes, of the places that all of them have. The first one is slow."""
    common = [name for name in each[0] if all(name in places for places in each)]
    return {name: statistics.median(places[name] for places in each[1:] or each) for name in common}


def even_cuts(places: Mapping[str, float], weights: Mapping[str, float], num_stages: int, model: str) -> list[str]:
    """The places at which the stages take about as long; of those as good as the best, that which divides the weights
    evenly. ``weights``: their part before each place. Raises ValueError where there are too few places."""
    names, cuts = list(places), list[str]()
    if len(names) < num_stages - 1:
        raise ValueError(
            f"a pipeline of {num_stages} stages cuts a model before {num_stages - 1} modules that forward calls once, "
            f"each after a layer of the stage before, and {model} has {len(names)}; use "
            f"{f'at most {len(names) + 1} stages, or ' if names else ''}another engine"
        )
    for stage in range(1, num_stages):
        first = names.index(cuts[-1]) + 1 if cuts else 0
        free = names[first : len(names) - (num_stages - 1 - stage)]  # the others are left to the stages after this
        even = stage / num_stages
        best = min(abs(places[name] - even) for name in free)
        ties = [name for name in free if abs(places[name] - even) <= best + TIE]
        cuts.append(min(ties, key=lambda name: abs(weights[name] - even)))
    return cuts
