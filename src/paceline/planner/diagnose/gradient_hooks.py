"""Gradient hooks: whether they are additive, so that hooks on parts of a sum equal one on the sum, unlike clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.planner.diagnose.layers_in_parts import Part
from paceline.planner.diagnose.saved_state import SavedState, unequal

SCALES = 1.0, 10.0, 1000.0  # of the gradient, to reach a clipping limit that this batch does not reach
NEAR = 1e-5
OWN = "paceline."


def _of_parameter(parameter: Tensor) -> list[Any]:
    tables = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [table for table in tables if table]


@contextlib.contextmanager
def _cleared(tables: Sequence[Any]) -> Iterator[None]:
    saved = [(table, dict(table)) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in saved:
            table.update(hooks)


def _is_ours(hook: Any) -> bool:
    return (getattr(hook, "__module__", "") or getattr(getattr(hook, "func", hook), "__module__", "")).startswith(OWN)


@contextlib.contextmanager
def off(model: nn.Module) -> Iterator[None]:
    """Disables all hooks: those on parameters and modules, and those that a forward pass registers on tensors."""
    register = Tensor.register_hook
    tables = [table for parameter in model.parameters() for table in _of_parameter(parameter)]
    tables += [t for module in model.modules() for t in (module._backward_hooks, module._backward_pre_hooks) if t]

    with _cleared(tables):
        Tensor.register_hook = lambda *_: SimpleNamespace(remove=lambda: None)  # type: ignore[method-assign]
        try:
            yield
        finally:
            Tensor.register_hook = register  # type: ignore[method-assign]


def on_parameters(
    model: nn.Module, parts: Sequence[Sequence[Tensor]], restore: Callable[[], None], saved: SavedState
) -> dict[str, Any]:
    """Names of parameters whose hooks are not additive: the hook of a sum is not the sum of the hooks of its terms.
    ``parts``: the gradient of each process. "updates": weights that a hook changes during backward."""
    named = dict(model.named_parameters())
    if all(_is_ours(hook) for p in named.values() for table in _of_parameter(p) for hook in table.values()):
        return {}

    def through(grads: Sequence[Tensor]) -> list[Tensor | None]:
        total = torch.zeros((), dtype=torch.float64)
        for parameter, grad in zip(named.values(), grads, strict=True):
            parameter.grad = None
            if parameter.requires_grad:
                total = total + (parameter * grad.detach()).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return [None if p.grad is None else p.grad.detach().clone() for p in named.values()]

    found: set[str] = set()
    updates: set[str] = set()
    for scale in SCALES:
        whole = through([scale * sum(each, start=torch.zeros(())) for each in zip(*parts, strict=True)])
        updates |= {name for name, (kind, _) in saved.changed().items() if kind == "trained"}
        restore()
        grads = []
        for part in parts:
            grads.append(through([scale * grad for grad in part]))
            restore()
        found |= {name for name, one, *many in zip(named, whole, *grads, strict=True) if not _adds_up(one, many)}
    return {"names": sorted(found), "updates": sorted(updates)} if found or updates else {}


def _adds_up(whole: Tensor | None, parts: Sequence[Tensor | None]) -> bool:
    """Whether the parts' gradients sum to the whole's; true if either has none."""
    given = [each for each in parts if each is not None]
    return whole is None or not given or not unequal(whole, sum(given, start=torch.zeros_like(whole)), NEAR)


def inside(
    model: nn.Module,
    backward_of: Callable[[Part | None, float], list[Tensor | None]],
    parts: Sequence[Part],
    with_running_statistics: Callable[[], contextlib.AbstractContextManager[None]],
) -> dict[str, Any]:
    """Parameters whose parts' gradients do not sum to the batch's; "how": "hook" if they do without hooks."""

    def unlike() -> list[str]:
        names: set[str] = set()
        for scale in SCALES:
            whole = backward_of(None, scale)
            grads = zip(model.named_parameters(), whole, *(backward_of(part, scale) for part in parts), strict=True)
            names |= {name for (name, _), one, *many in grads if not _adds_up(one, many)}
        return sorted(names)

    with _cleared([table for parameter in model.parameters() for table in _of_parameter(parameter)]):
        with with_running_statistics():
            found = unlike()
        if not found:
            return {}
        with with_running_statistics(), off(model):
            return {"names": found, "how": "function" if unlike() else "hook"}
