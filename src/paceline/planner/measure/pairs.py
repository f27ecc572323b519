"""Latency and bandwidth between every two hosts: a plan keeps them all, though a team is as slow as its slowest line.

Keys of a pair: ``one``, ``other`` (the hosts' names); ``latency_s`` (of one message without content, one way);
``bytes_per_s`` (one way, the slower of both).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.planner.measure.network import Wires

MAX_SHOWN = 15  # of six hosts; all are in the plan


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


def pair_table(pairs: Sequence[Between]) -> Table:
    """For a terminal: one line per pair, the slowest first where they are too many to be shown."""
    from rich.table import Table
    from rich.text import Text

    num_pairs = len(pairs)
    if num_pairs > MAX_SHOWN:
        pairs = sorted(pairs, key=lambda pair: pair.bytes_per_s)[:MAX_SHOWN]
    title = f"the slowest {MAX_SHOWN} of {num_pairs} pairs; the plan has all" if num_pairs > MAX_SHOWN else None
    drawn = Table("host", "host", "latency ms", "MB/s", box=None, pad_edge=False, title=title)
    for pair in pairs:
        cells = pair.one, pair.other, f"{pair.latency_s * 1e3:.2f}", f"{pair.bytes_per_s / 1e6:.1f}"
        drawn.add_row(*map(Text, cells))
    return drawn
