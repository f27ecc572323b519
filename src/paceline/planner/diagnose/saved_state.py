"""Saves and restores the state that a forward pass may change: parameters, buffers, and plain attributes of modules.

State elsewhere (globals, closures) is not restored, so that a repeated pass then gives another result.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

NEAR = 1e-6  # relative: above the rounding of float32, far below the effect of any cause
NEAR_ZERO = 1e-12
INNER = frozenset(vars(nn.Module())) | {"forward"}
DEPTH = 3
PLAIN = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device
CONTAINERS = list, tuple, set, dict, deque


class SavedState:
    """The state of ``roots``, keyed by a prefix of its names: modules, and objects with attributes, such as a loss."""

    def __init__(self, roots: Mapping[str, Any]):
        self.entries = list(dict.fromkeys(_entries(roots)))
        self.values = [_copied(table.of[key]) for table, key, _, _ in self.entries]

    def restore(self) -> None:
        for (table, key, _, _), value in zip(self.entries, self.values, strict=True):
            current = table.of.get(key)
            if isinstance(value, Tensor):
                old = table.objects[key]
                with torch.no_grad():
                    if old.shape != value.shape:
                        old = value.clone()
                    elif not torch.equal(old, value) or old.is_floating_point():
                        old.data.copy_(value)
                table.of[key] = old
            elif isinstance(current, torch.Generator):
                current.set_state(value)
            else:
                table.of[key] = copy.deepcopy(value)

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Sets some of the values that `changed` returned."""
        for table, key, name, _ in self.entries:
            if name not in values:
                continue
            value, current = values[name], table.of.get(key)
            if isinstance(current, torch.Generator):
                current.set_state(value)
            elif isinstance(current, Tensor) and isinstance(value, Tensor) and current.shape == value.shape:
                current.data.copy_(value)
            else:
                table.of[key] = copy.deepcopy(value)

    def changed(self) -> dict[str, tuple[str, Any]]:
        """Changes since the state was saved, by name: (trained, frozen, buffer or attribute; the current value)."""
        found: dict[str, tuple[str, Any]] = {}
        for (table, key, name, kind), value in zip(self.entries, self.values, strict=True):
            current = _copied(table.of.get(key))
            if not _equal(current, value):
                found[name] = kind, current
        return found


class _Table:
    """A namespace, equal to another one of the same dictionary."""

    def __init__(self, of: dict[str, Any]):
        self.of, self.objects = of, dict(of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Table) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


def unequal(one: Any, other: Any, tolerance: float = NEAR) -> bool:
    """Whether two values differ by more than a relative tolerance."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return True
        if not (one.is_floating_point() or one.is_complex()):
            return not torch.equal(one, other)
        size = torch.maximum(one.detach().norm(), other.detach().norm())
        return bool((one.detach() - other.detach()).norm() > tolerance * size + NEAR_ZERO)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) > tolerance * max(abs(one), abs(other)) + NEAR_ZERO
    if isinstance(one, CONTAINERS) and isinstance(other, CONTAINERS):
        ones, others = _leaves(one), _leaves(other)
        return len(ones) != len(others) or any(unequal(a, b, tolerance) for a, b in zip(ones, others, strict=True))
    return bool(one != other)


def _entries(roots: Mapping[str, Any]) -> Iterator[tuple[_Table, str, str, str]]:
    for prefix, root in roots.items():
        if isinstance(root, nn.Module):
            for where, module in root.named_modules():
                yield from _of_module(module, f"{prefix}{where}." if where else prefix)
        elif hasattr(root, "__dict__"):
            yield from _of_object(root, prefix, DEPTH)


def _of_module(module: nn.Module, where: str) -> Iterator[tuple[_Table, str, str, str]]:
    parameters, buffers = _Table(module._parameters), _Table(module._buffers)
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield parameters, key, where + key, "trained" if parameter.requires_grad else "frozen"
    for key, buffer in module._buffers.items():
        if buffer is not None:
            yield buffers, key, where + key, "buffer"
    yield from _of_object(module, where, DEPTH)


def _of_object(thing: Any, where: str, depth: int) -> Iterator[tuple[_Table, str, str, str]]:
    table = _Table(vars(thing))
    for key, value in vars(thing).items():
        if isinstance(thing, nn.Module) and key in INNER:
            continue
        if isinstance(value, torch.Generator) or _is_plain(value):
            yield table, key, where + key, "attribute"
        elif depth and _is_object(value):
            yield from _of_object(value, f"{where}{key}.", depth - 1)


def _is_object(value: Any) -> bool:
    """Whether a value is an instance of the user's own class, and no function, module or optimizer."""
    module = type(value).__module__ or ""
    if isinstance(value, nn.Module | torch.optim.Optimizer | type) or not hasattr(value, "__dict__"):
        return False
    return module.split(".")[0] not in ("torch", "builtins", "functools", "paceline")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_leaf or not value.requires_grad
    if isinstance(value, CONTAINERS):
        return type(value) in CONTAINERS and all(map(_is_plain, _items(value)))
    return isinstance(value, PLAIN)


def _items(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, CONTAINERS):
        return [leaf for item in _items(value) for leaf in _leaves(item)]
    return [value]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    try:
        return copy.deepcopy(value)
    except Exception:  # a value that cannot be copied is not restored
        return value


def _equal(current: Any, value: Any) -> bool:
    if isinstance(current, Tensor) and isinstance(value, Tensor):
        return current.shape == value.shape and torch.equal(current, value)
    if isinstance(current, CONTAINERS) and isinstance(value, CONTAINERS):
        ones, others = _leaves(current), _leaves(value)
        return len(ones) == len(others) and all(_equal(a, b) for a, b in zip(ones, others, strict=True))
    return bool(current == value) or (current != current and value != value)
