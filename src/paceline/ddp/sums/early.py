"""Sums of layers' gradients that begin during backward, for an optimizer's step that uses them.

rows       of each layer, where they pay, all ranks' are gathered; else the gradients themselves are summed
order      one for all ranks, the last layer first: a sum begins when those before it in this order have begun; a layer
           that a rank has not used goes to the end
the step   begins those that are left, of which this rank has no gradient yet
valid      where every rank's gradient is still what it gave; else the step sums anew, and this layer does not begin
           early again: it is called twice, or goes backward twice, before a step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ddp.sums.lane import Lane

NOT_BEGUN, VALID, STALE = 0, 1, 2
WHOLE = 1 << 40  # instead of a number of rows: more than pay
Sides = tuple[Tensor, Tensor]


@dataclass
class Own:
    """This rank's gradient of a layer: rows that pay, or else itself; copies, since they are sent while backward goes
    on. ``parts``: the objects that it was made of."""

    parts: Sequence[object]
    value: Sides | Tensor


@dataclass
class _Begun:
    parts: Sequence[object]
    everyone: Future[Sides | Tensor | None]


class EarlySums:
    """Of ``count`` layers, 0 the last. ``pays``: whether so many rows of each rank are fewer bytes than the sum of the
    layer's gradient."""

    def __init__(self, lane: Lane, count: int, pays: Callable[[int, int], bool]):
        self._lane, self._pays = lane, pays
        self._order = list(range(count))
        self._begun: dict[int, _Begun] = {}  # until a step takes them
        self._left = list(self._order)  # not begun since the newest step
        self._ready: dict[int, Own] = {}

    def ready(self, layer: int, made: Callable[[], Own]) -> None:
        """The gradient of one call is there; of a layer that has begun, or does not begin early, nothing is done."""
        if layer in self._left and layer not in self._ready:
            self._ready[layer] = made()
            while self._left and self._left[0] in self._ready:
                self._begin(self._left.pop(0))

    def _begin(self, layer: int) -> None:
        own = self._ready.pop(layer, None)
        self._begun[layer] = _Begun(
            own.parts if own else (), self._lane.submit(self._sum, layer, own.value if own else None)
        )

    def _sum(self, layer: int, own: Sides | Tensor | None) -> Sides | Tensor | None:
        """All ranks' rows, or the mean of their gradients. None, on all ranks alike, where a rank has neither."""
        count = 0 if own is None else WHOLE if isinstance(own, Tensor) else len(own[0])
        counts = [int(each) for each in self._lane.gathered(torch.tensor([count]))]
        if own is None or not min(counts):
            return None
        if not isinstance(own, Tensor):
            if self._pays(layer, max(counts)):
                left, right = self._lane.rows(own, [max(counts)] * 2)
                return left, right
            own = own[0].T @ own[1]
        self._lane.add(own.div_(self._lane.size))
        return own

    def close_round(self) -> None:
        """At a step, whichever layers it is for. What begins next is of the passes after it. Returns when all sums
        have ended, since the step may change how ranks gather."""
        while self._left:
            self._begin(self._left.pop(0))
        wait([each.everyone for each in self._begun.values()])

    def state(self, layer: int, parts: Sequence[object]) -> int:
        begun = self._begun.get(layer)
        if begun is None or not begun.parts:
            return NOT_BEGUN
        same = len(parts) == len(begun.parts) and all(
            one is other for one, other in zip(parts, begun.parts, strict=True)
        )
        return VALID if same else STALE

    def take(self, layers: Sequence[int], states: Sequence[Sequence[int]]) -> dict[int, Sides | Tensor]:
        """What is valid of ``layers``. ``states``: of all layers, by each rank."""
        found = {}
        for layer in layers:
            begun, said = self._begun.pop(layer, None), {each[layer] for each in states}
            everyone = begun.everyone.result() if begun else None
            if everyone is not None and said == {VALID}:
                found[layer] = everyone
            if layer in self._order and said != {VALID}:
                self._order.remove(layer)
                if STALE not in said:
                    self._order.append(layer)
        self._left = [layer for layer in self._order if layer not in self._begun]
        return found
