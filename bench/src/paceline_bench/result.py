"""What a benchmark found, beside what was demanded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Show = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """``reached``: the lower bound (or the figure, where it is one) is at least what was demanded.

    ``details``: for people, ``raw``: what JSON can hold, for whoever computes with it.
    """

    task: str
    what: str
    figure: str
    demanded: str
    reached: bool
    details: str = ""
    raw: Any = None
