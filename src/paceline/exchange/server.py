"""Parameter servers on the nodes themselves: each node sums and updates a shard of the weights, and sends it to all.

    push      every node's gradient of a shard goes to the node that serves it, while backward runs: a reduce-scatter
    chain     the sum goes on to the next node, which makes the same update, so that it has a copy of this shard's state
    update    each node updates its own shard, and the copy of the one before
    pull      the new weights of all shards: an all-gather after the vote; two nodes have updated all of them anyway

A node that fails leaves its shard to the next one. The step under way is summed on all nodes; after it the survivors
divide weights and optimizer state anew. If two neighbours fail at once, the run resumes from its newest checkpoint.

*Cost* (N nodes, n bytes): (2 N - 1) / N n sent per node, n of two nodes, where an all-reduce sends 2 (N - 1) / N n;
2 / N of the optimizer's work and state, where an all-reduce has all of it on every node. Gradients are sent while
backward runs, weights are not.
*Invariants*: equal to all-reduce up to the order of sums; a shard and its copy get the same sums; replicas are
bit-equal after each step, two nodes where their processors round alike, as with an all-reduce; no update that a node
has acknowledged is lost with any one node.
*Source*: Li et al. 2014 (OSDI), "Scaling Distributed Machine Learning with the Parameter Server", sections 3.3 and 4.3.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import contract, transport
from paceline.errors import ShardsLost
from paceline.exchange import allreduce
from paceline.exchange.flow.together import joined
from paceline.messages import (
    DENSE,
    REDUCE_SCATTER,
    SHIFT,
    SUM,
    Bucket,
    CodecRun,
    Coded,
    Collective,
    ExchangeTraffic,
    Gradient,
    Round,
    Shard,
    StepContext,
    StepOutcome,
    Tally,
    Target,
    Vote,
)

WITH_COPIES = 2  # nodes, of which each has all shards: its own, and the other's as a copy
States = dict[Shard, tuple[Tensor, dict[str, Any]]]  # (values, the optimizer's state) of each


class Push(contract.Codec):
    """The sum of a bucket for the node that serves each part of it, and for the next one; with ``to_all`` for all."""

    to_all = False

    def rounds(self, bucket: Bucket, size: int, dtype: torch.dtype) -> Sequence[Round]:
        if self.to_all:
            return [Round(SUM, bucket.numel * dtype.itemsize)]
        part_bytes = -(-bucket.numel // size) * dtype.itemsize
        return [Round(REDUCE_SCATTER, size * part_bytes), Round(SHIFT, part_bytes)]

    def run(self, bucket: Bucket, values: Tensor, state: Any, context: StepContext) -> CodecRun:
        if self.to_all:
            return Coded((yield Collective(SUM, values)))
        size, rank = context.size, context.rank
        padding = -bucket.numel % size
        padded = torch.cat([values, values.new_zeros(padding)]) if padding else values
        own = yield Collective(REDUCE_SCATTER, padded.view(size, -1))
        copy = yield Collective(SHIFT, own)
        for part, its in ((rank, own), ((rank - 1) % size, copy)):
            into = values[_part(bucket, part, size)]
            into.copy_(its.view(-1)[: len(into)])
        return Coded(values)  # of which other parts are not sums


class Exchange(allreduce.Exchange):
    """``held``: (rank, size) by which the optimizer is divided, if it is."""

    overlaps = ("backward",)
    uses_codec, divides_optimizer = False, True

    def __init__(self) -> None:
        super().__init__(DENSE, "never")
        self.own_codec = self.push = Push()
        self.held = 0, 1
        self._updated = False  # since the weights were last collected
        self._assembled: States | None = None  # by `average`, until all ranks have it

    def open(
        self, engine: contract.Engine, link: transport.Link, codec: contract.Codec, rows: int = 1, seed: int = 0
    ) -> None:
        super().open(engine, link, codec, rows, seed)
        self.optimizer, self.names = engine.divided_optimizer(), engine.names

    def forms(self) -> Sequence[str]:
        return [DENSE] * len(self.buckets)

    @property
    def _position(self) -> tuple[int, int]:
        return self.link.rank, self.link.size

    @property
    def _divided(self) -> bool:
        return self.optimizer.shards is not None

    def begin(self) -> None:
        self.push.to_all = self._divided and self.held != self._position  # shards are as before a node failed
        super().begin()

    def _divide(self) -> None:
        """At a commit: only then all nodes know that they divide by the same ranks."""
        rank, size = self.held = self._position
        parts = dict.fromkeys((rank, (rank - 1) % size))
        self.optimizer.divide([shard for part in parts for each in self.buckets for shard in _shards(each, part, size)])

    def collect(self, vote: Vote) -> Vote:
        vote = super().collect(vote)
        if self._divided or self.link.size > 1:
            gradients = [gradient for gradient, _ in self._received] or self._flight.waiting.values()
            vote.squares = sum(self._squares(each) for each in gradients)
        return vote

    def _squares(self, gradient: Gradient) -> float:
        assert gradient.flat is not None
        own = gradient.flat[_part(gradient.bucket, *self._position)]
        dtype = torch.float32 if own.itemsize < 4 else None
        return float(torch.linalg.vector_norm(own, dtype=dtype)) ** 2

    def finish(self, tally: Tally) -> StepOutcome:
        outcome = super().finish(tally)
        self._updated = bool(outcome.gradients)
        if self._updated and self.link.size > 1 and not self._divided:
            self._divide()
        return outcome

    def average(self, weights: Sequence[Tensor], now: bool, state: bool = False) -> Sequence[Target] | None:
        if not self._divided or not (self._updated or state):
            return None
        if state or self.held != self._position:
            return self._assemble()
        if self.link.size <= WITH_COPIES:
            return []
        pulls = [self._pull(bucket) for bucket in self.buckets]
        return self._targets(
            torch.cat(pull.wait())[: each.numel] for each, pull in zip(self.buckets, pulls, strict=True)
        )

    def _pull(self, bucket: Bucket) -> Any:
        nothing = self.optimizer.values((bucket.names[0], 0, 0))
        values = joined([nothing, *map(self.optimizer.values, _shards(bucket, *self._position))])
        padding = nothing.new_zeros(-(-bucket.numel // self.link.size) - len(values))
        what = f"weights of bucket {bucket.index}: {bucket.names[0]}"
        return self._lane.all_gather(torch.cat([values, padding]), what, even=True)

    def _assemble(self) -> Sequence[Target]:
        """The weights, where all shards and their state have been collected."""
        place = torch.tensor(self.held)
        held = [tuple(each.tolist()) for each in self.link.all_gather(place, "who has which shards", even=True).wait()]
        size = self.held[1]
        ranks = [rank for rank, _ in held]
        # the node that serves a part, else the one that has its copy
        senders = {part: next((r for r in (part, (part + 1) % size) if r in ranks), None) for part in range(size)}
        if lost := [part for part, sender in senders.items() if sender is None]:
            text = f"{'part' if len(lost) == 1 else 'parts'} {', '.join(str(each + 1) for each in lost)} of {size}"
            raise ShardsLost(
                f"{text} of the optimizer's state, and its copy, were lost with two neighbouring nodes before the "
                f"others could copy it again"
            )
        mine = [part for part, sender in senders.items() if sender == self.held[0]]
        self._assembled = {}
        for bucket in self.buckets:
            self._assembled |= self._gathered(bucket, mine)
        found = self._assembled
        parts = [[shard for part in range(size) for shard in _shards(each, part, size)] for each in self.buckets]
        return self._targets(torch.cat([found[shard][0] for shard in shards]) for shards in parts)

    def _gathered(self, bucket: Bucket, mine: Sequence[int]) -> States:
        """All shards of the bucket. ``mine``: the parts that this node sends."""
        shards = [shard for part in mine for shard in _shards(bucket, part, self.held[1])]
        # of a view the whole weight would be sent
        sent: States = {each: (self.optimizer.values(each).clone(), self.optimizer.state(each)) for each in shards}
        message = io.BytesIO()
        torch.save(sent, message)
        payload = torch.frombuffer(bytearray(message.getbuffer()), dtype=torch.uint8)
        found: States = {}
        for part in self.link.all_gather(payload, f"state of bucket {bucket.index}").wait():
            found |= torch.load(io.BytesIO(part.numpy().tobytes()), map_location="cpu", weights_only=True)
        return found

    def _targets(self, flats: Iterator[Tensor]) -> Sequence[Target]:
        places = {name: i for i, name in enumerate(self.names)}
        return [
            Target(places[name], values)
            for bucket, flat in zip(self.buckets, flats, strict=True)
            for name, values in zip(bucket.names, torch.split(flat, list(bucket.numels)), strict=True)
        ]

    def averaged(self) -> None:
        self._updated = False
        if self._assembled is not None:
            self.optimizer.assemble({shard: state for shard, (_, state) in self._assembled.items()})
            self._assembled = None

    def close(self) -> None:
        super().close()
        self.optimizer.assemble({})  # where it is still divided, after an error

    def traffic(self, dtype: torch.dtype) -> ExchangeTraffic:
        return ExchangeTraffic(factors=False, copy_bytes=dtype.itemsize)


def _part(bucket: Bucket, part: int, size: int) -> slice:
    """The values of one of ``size`` equal parts of a bucket, of which the last may be smaller or empty."""
    length = -(-bucket.numel // size)
    return slice(part * length, (part + 1) * length)


def _shards(bucket: Bucket, part: int, size: int) -> Iterator[Shard]:
    its, start = _part(bucket, part, size), 0
    for name, numel in zip(bucket.names, bucket.numels, strict=True):
        low, high = max(its.start - start, 0), min(its.stop - start, numel)
        if low < high:
            yield name, low, high
        start += numel
