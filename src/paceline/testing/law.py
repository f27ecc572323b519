"""A law: a function that asserts something of a method, with the values that it is tried with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Law:
    """``check(method, **values)`` raises AssertionError where the method breaks it."""

    check: Callable[..., None]
    values: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()  # of the values, for `str`

    def __call__(self, method: Any) -> None:
        self.check(method, **self.values)

    def __str__(self) -> str:
        return "-".join((self.check.__name__, *self.names))
