"""DiLoCo: each node trains alone, and every k steps the sum of what they have learnt is one step of an outer optimizer.

    delta      weights at the last outer step - weights now, weighted by the node's samples, through the codec
    momentum   beta momentum + sum of deltas
    weights    weights at the last outer step - lr (sum of deltas + beta momentum)

*Use* with many steps between (``diloco:period=500``) on slow links; momentum of the inner optimizer stays local. An
outer step is taken early before weights are saved, evaluated, or training ends.
*Cost*: the codec's bytes every ``period`` steps, none between; memory for two more copies of the weights.
*Invariants*: lr 1 and beta 0 is local SGD, and with period 1 and plain SGD inside it is all-reduce; after an outer step
all replicas are bit-equal, and where a codec has given nodes other bits, the next outer step begins from rank 0's, with
one line that says so. A lost node is dropped with its steps since the last outer step.
*Source*: Douillard et al. 2023 (arXiv 2311.08105), algorithm 1, with Nesterov momentum.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline import contract, transport
from paceline.exchange import local_sgd
from paceline.exchange.flow.cost_model import coded_traffic
from paceline.exchange.flow.together import declared, joined, over_link
from paceline.messages import Bucket, ExchangeTraffic, StepContext, Target
from paceline.report.log import log


class Exchange(local_sgd.Exchange):
    """``lr``, ``beta``: of the outer optimizer, SGD with Nesterov momentum."""

    uses_codec = True

    def __init__(self, period: int = 100, lr: float = 0.7, beta: float = 0.9):
        super().__init__(period)
        if not (isinstance(lr, int | float) and lr > 0 and isinstance(beta, int | float) and 0 <= beta < 1):
            raise ValueError(f"exchange 'diloco' needs lr > 0 and 0 <= beta < 1, got lr={lr!r}, beta={beta!r}")
        self.lr, self.beta = lr, beta

    def open(
        self, engine: contract.Engine, link: transport.Link, codec: contract.Codec, rows: int = 1, seed: int = 0
    ) -> None:
        super().open(engine, link, codec)
        self.codec, self.seed, self.weights = codec, seed, dict(zip(engine.names, engine.weights, strict=False))
        self.num_outer_steps, self._logged = 0, False
        self.memory = {bucket.index: codec.init(bucket, seed) for bucket in engine.buckets}
        self.anchor: dict[str, Tensor] = {}  # the weights at the last outer step
        self.momentum: dict[int, Tensor] = {}  # by bucket; none before the first outer step
        self._next: tuple[dict[str, Tensor], dict[int, Tensor], dict[int, Any]] = {}, {}, {}

    def begin(self) -> None:
        if not self.anchor and self.link.size > 1:
            self.anchor = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def _combined(self, weights: Sequence[Tensor], share: float) -> Sequence[Target]:
        self._agree()
        present = dict(zip(self.weights, weights, strict=True))
        anchor, momentum, memory = dict[str, Tensor](), dict[int, Tensor](), dict[int, Any]()
        context = StepContext(self.num_outer_steps, self.link.rank, self.link.size)
        for bucket in self.buckets:
            before = joined([self.anchor[name] for name in bucket.names])
            now = joined([present[name].detach() for name in bucket.names])
            run = declared(self.codec, bucket, (before - now) * share, self.memory[bucket.index], context)
            coded = over_link(run, self.link, f"outer gradient of {', '.join(bucket.names[:2])}")
            old = self.momentum.get(bucket.index)
            new = coded.total if old is None else self.beta * old + coded.total
            after = before - self.lr * (coded.total + self.beta * new)
            anchor |= _parts(bucket, after)
            momentum[bucket.index], memory[bucket.index] = new, coded.state
        self._next = anchor, momentum, memory
        return [Target(i, anchor[name].reshape(-1)) for i, name in enumerate(self.weights) if name in anchor]

    def _last(self) -> list[Tensor]:
        """Weights and momentum at the last outer step, of each bucket."""
        last = [joined([self.anchor[name] for name in bucket.names]) for bucket in self.buckets]
        return last + [self.momentum.get(i, torch.zeros_like(each)) for i, each in enumerate(last)]

    def _hash(self) -> int:
        check = 0
        for each in self._last():
            check = zlib.crc32(each.view(torch.uint8).cpu().numpy().data, check)
        return check

    def _agree(self) -> None:
        """The last outer step is rank 0's on all nodes."""
        if len({check for *_, check in self._reports}) == 1:
            return
        last = self._last()
        if self.link.rank == 0 and not self._logged:
            log.warning(
                "the nodes' weights differed after outer step %d, as they do where processors, libraries or a codec "
                "round differently; from now on all continue from rank 0's",
                self.num_outer_steps,
            )
        self._logged = True
        for each in last:
            self.link.broadcast(each, what="the last outer step of rank 0").wait()
        for bucket, anchor, momentum in zip(self.buckets, last, last[len(self.buckets) :], strict=False):
            self.anchor |= _parts(bucket, anchor)
            self.momentum[bucket.index] = momentum
            self.memory[bucket.index] = self.codec.on_view_change(bucket, self.memory[bucket.index], self.seed)

    def averaged(self) -> None:
        super().averaged()
        (self.anchor, self.momentum, self.memory), self._next = self._next, ({}, {}, {})
        self.num_outer_steps += 1

    def traffic(self, dtype: torch.dtype) -> ExchangeTraffic:
        return replace(coded_traffic(self.codec, self.buckets, dtype), every=self.period)

    def state(self) -> dict[str, Any]:
        momentum = [[list(self.buckets[index].names), each] for index, each in self.momentum.items()]
        outer = {"momentum": momentum, "num_outer_steps": self.num_outer_steps}
        return {**super().state(), "outer": outer, "memory": self.memory}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        saved = {tuple(names): momentum for names, momentum in state["outer"]["momentum"]}
        # of a checkpoint whose buckets have other parameters, theirs begins anew
        kept = [each for each in self.buckets if each.names in saved]
        self.momentum = {each.index: saved[each.names].to(self.weights[each.names[0]].device) for each in kept}
        self.num_outer_steps, self.memory = state["outer"]["num_outer_steps"], state.get("memory", self.memory)
        self.anchor = {}  # the restored weights, at the next `begin`

    def rebuild(self, link: transport.Link) -> None:
        super().rebuild(link)
        for bucket in self.buckets:
            state = self.memory[bucket.index]
            self.memory[bucket.index] = self.codec.on_view_change(bucket, state, self.seed)


def _parts(bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
    parts = zip(bucket.names, torch.split(flat, list(bucket.numels)), bucket.shapes, strict=True)
    return {name: part.view(shape) for name, part, shape in parts}
