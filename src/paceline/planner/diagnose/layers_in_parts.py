"""Which layers give a different output for a part of a batch, each tested on its inputs from the whole batch.

A pass of the whole batch records inputs and outputs of every module. Then a part of the batch passes. A module with the
same inputs but another output is reported, and its output is replaced by that of the whole batch. So every later module
is tested independently, and a module that contains it is reported only for its own code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from paceline.planner.diagnose.saved_state import NEAR, unequal

Run = Callable[[], Any]


@dataclass
class Part:
    """Samples [start, stop) of ``count``."""

    start: int
    stop: int
    count: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, whole: Tensor, like: Tensor) -> Tensor | None:
        """The part's values of a tensor of the whole batch, shaped as ``like``; None if no dimension has the samples.
        Samples may lie along any dimension, also merged with another one (batch x time, time x batch)."""
        if whole.dim() != like.dim():
            return None
        if whole.shape == like.shape and self.size != self.count:
            return whole  # no dimension has samples
        found: Tensor | None = None
        for cut in self._cuts(whole, like):
            found = cut if found is None else found
            if not unequal(cut, like):
                return cut
        return found

    def _cuts(self, whole: Tensor, like: Tensor) -> Iterator[Tensor]:
        unlike = [d for d in range(whole.dim()) if whole.shape[d] != like.shape[d]]
        if self.size == self.count:
            if not unlike:
                yield whole
            return
        for d in unlike:
            each, remainder = divmod(whole.shape[d], self.count)
            if not each or remainder or like.shape[d] != each * self.size:
                continue
            narrow = whole
            for other in unlike:  # padding: a part may be shorter
                if other != d:
                    if like.shape[other] > whole.shape[other]:
                        return
                    narrow = narrow.narrow(other, 0, like.shape[other])
            yield narrow.narrow(d, self.start * each, self.size * each)
            if each > 1:
                shape = [*narrow.shape[:d], each, self.count, *narrow.shape[d + 1 :]]
                apart = narrow.reshape(shape).narrow(d + 1, self.start, self.size)
                yield apart.reshape(like.shape)


@dataclass
class Call:
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass
class Trace:
    calls: dict[str, list[Call]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


@dataclass
class Trial:
    """``unlike``: modules with equal inputs but different outputs, and the relative difference.

    ``paths``: those of them that called other modules than for the whole batch (a branch).
    """

    unlike: dict[str, float] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)


def trace(model: nn.Module, run: Run) -> Trace:
    """Inputs and outputs of every module during ``run``."""
    found = Trace()

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found.calls.setdefault(name, []).append(Call(inputs.pop(name).pop(), _tensors(output)))

    inputs: dict[str, list[list[Tensor]]] = {}

    def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        found.order.append(name)
        inputs.setdefault(name, []).append(_tensors((args, kwargs)))

    with _hooks(model, begin, keep):
        run()
    return found


def compare(model: nn.Module, run: Run, whole: Trace, part: Part, forces: bool = False) -> Trial:
    """Compares ``run``, a pass of ``part``, with ``whole``. ``forces``: modules also get the whole batch's inputs."""
    trial, seen = Trial(), dict[str, int]()
    begun: dict[str, list[tuple[bool, int]]] = {}
    order: list[str] = []

    def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        order.append(name)
        number = seen[name] = seen.get(name, -1) + 1
        calls, equal, inputs = whole.calls.get(name, []), False, None
        if number < len(calls):
            leaves, tree = tree_flatten((args, kwargs))
            equal, changed = _alike(leaves, calls[number].inputs, part)
            if not equal and forces and changed is not None:
                equal, inputs = True, tree_unflatten(changed, tree)
        begun.setdefault(name, []).append((equal, number))
        return inputs

    def end(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        equal, number = begun[name].pop()
        if not equal:
            return None
        leaves, tree = tree_flatten(output)
        same, changed = _alike(leaves, whole.calls[name][number].outputs, part)
        if same or changed is None:
            return None
        trial.unlike[name] = max(trial.unlike.get(name, 0.0), _gap(leaves, changed))
        return tree_unflatten(changed, tree)

    with _hooks(model, begin, end):
        run()
    for name in trial.unlike:
        below = f"{name}." if name else ""
        called, called_before = ([each for each in calls if each.startswith(below)] for calls in (order, whole.order))
        if called != called_before:
            trial.paths.add(name)
    return trial


def _alike(leaves: list[Any], whole: list[Tensor], part: Part) -> tuple[bool, list[Any] | None]:
    """(whether the values equal the whole batch's, the whole batch's values; None if they are not comparable)."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(tensors) != len(whole):
        return False, None
    equal, changed, expected = True, list[Any](), iter(whole)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            changed.append(leaf)
            continue
        before = next(expected)
        cut = part.of(before, leaf)
        if cut is None:
            return False, None
        near = 1e-4 if leaf.dtype in (torch.float32, torch.float16, torch.bfloat16) else NEAR
        # a value without samples, such as a loss, may differ
        differs = (before.shape != leaf.shape or part.size == part.count) and unequal(cut, leaf, near)
        equal = equal and not differs
        changed.append(cut.to(leaf.dtype) if differs else leaf)
    return equal, changed


def _gap(leaves: list[Any], changed: list[Any]) -> float:
    largest = 0.0
    for leaf, cut in zip(leaves, changed, strict=True):
        if isinstance(leaf, Tensor) and leaf is not cut:
            floats = leaf.is_floating_point()
            largest = max(largest, float((leaf.detach() - cut).norm() / cut.norm().clamp_min(1e-30)) if floats else 1.0)
    return largest


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf.detach().clone() for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def _hooks(model: nn.Module, begin: Callable[..., Any], end: Callable[..., Any]) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        handles.append(module.register_forward_pre_hook(partial(begin, name), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(end, name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def doubled(tree: Any, count: int) -> Any:
    """A tree of tensors in which those with ``count`` samples first are repeated twice."""
    return tree_map_only(Tensor, lambda leaf: torch.cat([leaf, leaf]) if _first(leaf, count) else leaf, tree)


def cut(tree: Any, part: Part) -> Any:
    """A part of a tree of tensors with the samples first, also merged with another dimension (batch x time)."""

    def change(leaf: Tensor) -> Tensor:
        if not _first(leaf, part.count):
            return leaf
        each = len(leaf) // part.count
        return leaf[part.start * each : part.stop * each]

    return tree_map_only(Tensor, change, tree)


def _first(leaf: Tensor, count: int) -> bool:
    return leaf.dim() > 0 and len(leaf) > 0 and len(leaf) % count == 0
