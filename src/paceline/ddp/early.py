"""Gathers of layers' rows that begin during backward, for an optimizer's step that uses them.

order      one for all ranks, the last layer first: a gather begins when those before it in this order have begun
the step   begins those that are left, of which this rank has no rows yet
valid      where every rank's gradient is still of the rows that it gave; else the step gathers anew, and this layer
           does not begin early again: it is called twice, or goes backward twice, before a step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ddp.lane import Lane
from paceline.engine.compute.gradient_hooks import Call

NOT_BEGUN, VALID, STALE = 0, 1, 2
Sides = tuple[Tensor, Tensor]


@dataclass
class _Begun:
    calls: Sequence[Call]
    everyone: Future[Sides | None]


class EarlyGathers:
    """Of ``count`` layers. ``pays``: whether so many rows of each rank are fewer bytes than the sum of the layer's
    gradient."""

    def __init__(self, lane: Lane, count: int, pays: Callable[[int, int], bool]):
        self._lane, self._pays = lane, pays
        self._order = list(reversed(range(count)))
        self._begun: dict[int, _Begun] = {}  # until a step takes them
        self._left = list(self._order)  # not begun since the newest step
        self._ready: dict[int, tuple[Sequence[Call], Sides]] = {}

    def ready(self, layer: int, calls: Sequence[Call], sides: Callable[[], Sides]) -> None:
        """The rows of one call are there; of a layer that has begun, or does not begin early, nothing is done."""
        if layer in self._left and layer not in self._ready:
            left, right = sides()
            self._ready[layer] = (
                list(calls),
                (left.clone(), right.clone()),
            )  # copies: they are sent while backward goes on
            while self._left and self._left[0] in self._ready:
                self._begin(self._left.pop(0))

    def _begin(self, layer: int) -> None:
        calls, sides = self._ready.pop(layer, ((), None))
        self._begun[layer] = _Begun(calls, self._lane.submit(self._gather, layer, sides))

    def _gather(self, layer: int, sides: Sides | None) -> Sides | None:
        """None, on all ranks alike, where a rank has no rows, or they do not pay."""
        counts = [int(each) for each in self._lane.gathered(torch.tensor([len(sides[0]) if sides else 0]))]
        if sides is None or not min(counts) or not self._pays(layer, max(counts)):
            return None
        left, right = self._lane.rows(sides, [max(counts)] * 2)
        return left, right

    def close_round(self) -> None:
        """At a step, whichever layers it is for. What begins next is of the passes after it. Returns when all gathers
        have ended, since the step may change how ranks gather."""
        while self._left:
            self._begin(self._left.pop(0))
        wait([each.everyone for each in self._begun.values()])

    def state(self, layer: int, calls: Sequence[Call]) -> int:
        begun = self._begun.get(layer)
        if begun is None or not begun.calls:
            return NOT_BEGUN
        same = len(calls) == len(begun.calls) and all(
            one is other for one, other in zip(calls, begun.calls, strict=True)
        )
        return VALID if same else STALE

    def take(self, layers: Sequence[int], states: Sequence[Sequence[int]]) -> dict[int, Sides]:
        """All ranks' rows of those ``layers`` whose gathers are valid. ``states``: of all layers, by each rank."""
        found = {}
        for layer in layers:
            begun, said = self._begun.pop(layer, None), {each[layer] for each in states}
            everyone = begun.everyone.result() if begun else None
            if everyone and said == {VALID}:
                found[layer] = everyone
            if STALE in said:
                self._order.remove(layer)
        self._left = [layer for layer in self._order if layer not in self._begun]
        return found
