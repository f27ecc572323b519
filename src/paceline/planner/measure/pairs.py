"""Latency and bandwidth between every two hosts: a plan keeps them all, though a team is as slow as its slowest line.

Keys of a pair: ``one``, ``other`` (the hosts' names); ``latency_s`` (of one message without content, one way);
``bytes_per_s`` (one way, the slower of both).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.planner.measure.network import Wires


@dataclass(frozen=True)
class Between:
    """Two hosts. The keys are explained above."""

    one: str
    other: str
    latency_s: float
    bytes_per_s: float


def between(wires: Wires, names: Sequence[str]) -> tuple[Between, ...]:
    """``names``: of the hosts, by rank."""
    return tuple(Between(names[pair.one], names[pair.other], pair.latency_s, pair.bytes_per_s) for pair in wires.pairs)
