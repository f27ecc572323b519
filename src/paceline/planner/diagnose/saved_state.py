"""All that a forward pass may change: parameters, buffers, and plain attributes of the modules; put back afterwards.

State that lies elsewhere (globals, closures) is not restored: a repeated pass then gives another result.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

NEAR = 1e-6  # relative: rounding of float32 lies below, every cause of a difference far above
NOTHING = 1e-12
INNER = frozenset(vars(nn.Module())) | {"forward"}
DEPTH = 3
PLAIN = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device
HELD = list, tuple, set, dict, deque


class Kept:
    """Of ``roots``, by the name that theirs begin with: modules, and objects with plain values, such as a loss."""

    def __init__(self, roots: Mapping[str, Any]):
        self.places = list(dict.fromkeys(_places(roots)))
        self.values = [_copied(table.of[key]) for table, key, _, _ in self.places]

    def restore(self) -> None:
        for (table, key, _, _), value in zip(self.places, self.values, strict=True):
            now = table.of.get(key)
            if isinstance(value, Tensor):
                old = table.objects[key]
                with torch.no_grad():
                    if old.shape != value.shape:
                        old = value.clone()
                    elif not torch.equal(old, value) or old.is_floating_point():
                        old.data.copy_(value)
                table.of[key] = old
            elif isinstance(now, torch.Generator):
                now.set_state(value)
            else:
                table.of[key] = copy.deepcopy(value)

    def put(self, values: Mapping[str, Any]) -> None:
        """Some of what `changed` gave."""
        for table, key, name, _ in self.places:
            if name not in values:
                continue
            value, now = values[name], table.of.get(key)
            if isinstance(now, torch.Generator):
                now.set_state(value)
            elif isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
                now.data.copy_(value)
            else:
                table.of[key] = copy.deepcopy(value)

    def changed(self) -> dict[str, tuple[str, Any]]:
        """(trained, frozen, buffer or attribute; what it is now) by name, of what is not as it was."""
        found: dict[str, tuple[str, Any]] = {}
        for (table, key, name, kind), value in zip(self.places, self.values, strict=True):
            now = _copied(table.of.get(key))
            if not _equal(now, value):
                found[name] = kind, now
        return found


class _Table:
    """A namespace; two of the same one are equal."""

    def __init__(self, of: dict[str, Any]):
        self.of, self.objects = of, dict(of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Table) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


def far(one: Any, other: Any, near: float = NEAR) -> bool:
    """Whether two values differ by more than rounding."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return True
        if not (one.is_floating_point() or one.is_complex()):
            return not torch.equal(one, other)
        size = torch.maximum(one.detach().norm(), other.detach().norm())
        return bool((one.detach() - other.detach()).norm() > near * size + NOTHING)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) > near * max(abs(one), abs(other)) + NOTHING
    if isinstance(one, HELD) and isinstance(other, HELD):
        ones, others = _flat(one), _flat(other)
        return len(ones) != len(others) or any(far(a, b, near) for a, b in zip(ones, others, strict=True))
    return bool(one != other)


def _places(roots: Mapping[str, Any]) -> Iterator[tuple[_Table, str, str, str]]:
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
    """One of the user's own classes, and no function or module."""
    module = type(value).__module__ or ""
    if isinstance(value, nn.Module | torch.optim.Optimizer | type) or not hasattr(value, "__dict__"):
        return False
    return module.split(".")[0] not in ("torch", "builtins", "functools", "paceline")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_leaf or not value.requires_grad
    if isinstance(value, HELD):
        return type(value) in HELD and all(map(_is_plain, _items(value)))
    return isinstance(value, PLAIN)


def _items(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, HELD):
        return [leaf for item in _items(value) for leaf in _flat(item)]
    return [value]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be copied cannot be put back
        return value


def _equal(now: Any, value: Any) -> bool:
    if isinstance(now, Tensor) and isinstance(value, Tensor):
        return now.shape == value.shape and torch.equal(now, value)
    if isinstance(now, HELD) and isinstance(value, HELD):
        ones, others = _flat(now), _flat(value)
        return len(ones) == len(others) and all(_equal(a, b) for a, b in zip(ones, others, strict=True))
    return bool(now == value) or (now != now and value != value)
