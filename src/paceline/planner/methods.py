"""How the nodes of a team communicate: every exchange and codec, each as one line, and why it is chosen or not.

Keys of a method: ``exchange`` and ``codec``, as `join` takes them; ``nodes``, ``batch_size``, ``link`` (of the team
that it is for, as there); ``fidelity`` ("exact": the updates of all-reduce, "rounded" or "approximate": others);
``predicted_s`` (seconds per step of the team); ``predicted_speedup`` (throughput over that of the fastest machine
alone); ``sent_bytes`` (by each node, per step); ``exposed_s`` (seconds per step of communication without overlap);
``reason``. The first one is the job's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.messages import ExchangeTraffic
from paceline.planner.teams import WORTH

REFUSED = "refused: "
MANY = 1024  # nodes, of which all methods are asked
FIDELITIES = "exact", "rounded", "approximate"


@dataclass(frozen=True)
class MeasuredMethod:
    """What one node sends and computes with it, or why it cannot have it. ``most_nodes``: among which it can be used,
    if fewer than MANY."""

    exchange: str
    codec: str
    fidelity: str = "exact"
    traffic: ExchangeTraffic = field(default_factory=ExchangeTraffic)
    refused: str = ""
    chosen: bool = False
    most_nodes: int = MANY

    @classmethod
    def of(cls, fields: dict[str, Any]) -> MeasuredMethod:
        return cls(**{**fields, "traffic": ExchangeTraffic(**fields["traffic"])})


@dataclass(frozen=True)
class Method:
    """One line of a plan. The module's docstring explains the keys."""

    exchange: str
    codec: str
    nodes: int
    batch_size: int | None = None
    link: str = ""
    fidelity: str = "exact"
    predicted_s: float | None = None
    predicted_speedup: float | None = None
    sent_bytes: float | None = None
    exposed_s: float | None = None
    reason: str = ""


def reason(own_s: float, predicted_s: float, fidelity: str, own: str = FIDELITIES[0]) -> str:
    """Why it is not the job's own, of fidelity ``own``, which takes ``own_s``; 0: which is refused."""
    exact = "the same updates" if own == FIDELITIES[0] else "exact updates"
    updates = exact if fidelity == FIDELITIES[0] else f"other updates ({fidelity})"
    if not own_s:
        return f"{updates}; the job's own is refused"
    times = own_s / predicted_s
    return f"{updates}, {times:.2f}x the job's own" if times >= WORTH else f"{updates}, not faster"


def on_all(first: MeasuredMethod, others: Sequence[Sequence[MeasuredMethod]]) -> list[MeasuredMethod]:
    """The same method as each of the other nodes has measured it; one without it refuses."""
    missing = MeasuredMethod(first.exchange, first.codec, refused="another node does not have it")
    key = first.exchange, first.codec
    return [first, *(next((m for m in each if (m.exchange, m.codec) == key), missing) for each in others)]


def first_refusal(nodes: Sequence[MeasuredMethod]) -> str:
    """Why one of the nodes cannot have it; empty where all can."""
    if refused := next((each.refused for each in nodes if each.refused), ""):
        return refused
    most = min(each.most_nodes for each in nodes)
    return f"at most {most} nodes can use it" if most < min(len(nodes), MANY) else ""
