"""A model, its loss and one of its batches, for experiments; and the batch's parts, one for each process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn

from paceline.planner.diagnose.layers_in_parts import Part
from paceline.planner.diagnose.loss_kind import Judge

MAX_PARTS = 3
Counted = Mapping[str, tuple[float, float]]  # of a metric: (sum, weight) by name


@dataclass
class Subject:
    """``forward(rows)`` is the model's output. ``judge``: the loss; None in a loop of the user's own.

    ``own_loss``: the model computes it. ``read``: the parts as their processes read them, where that is known. ``seed``
    sets every generator. ``loss``: the object, which may hold state.
    """

    model: nn.Module
    forward: Callable[[Any], Any]
    judge: Judge | None
    rows: Any
    parts: list[Part]
    seed: Callable[[int], None]
    own_loss: bool = False
    read: list[Any] = field(default_factory=list)
    metric: Callable[[Any, Any], Counted] | None = None
    loss: Any = None

    @property
    def count(self) -> int:
        return self.parts[0].count

    @property
    def whole(self) -> Part:
        return Part(0, self.count, self.count)


def parts_of(count: int, edges: Sequence[tuple[int, int]] = ()) -> list[Part]:
    """The processes' parts of a batch, several of them as one where there are many; of one process alone two halves."""
    known = sorted({(start, stop) for start, stop in edges if start < stop})
    whole = known and known[0][0] == 0 and known[-1][1] == count
    if len(known) < 2 or not whole or any(a[1] != b[0] for a, b in pairwise(known)):
        known = [(0, count // 2), (count // 2, count)]
    groups = [known[len(known) * i // MAX_PARTS : len(known) * (i + 1) // MAX_PARTS] for i in range(MAX_PARTS)]
    return [Part(group[0][0], group[-1][1], count) for group in groups if group]
