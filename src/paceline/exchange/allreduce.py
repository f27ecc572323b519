"""All-reduce of gradients while backward runs; fully-connected layers as low-rank (outer-product) factors.

*Cost* (N ranks, n bytes dense): 2 (N - 1) / N n sent per rank on a ring; a layer sent as factors costs
(N - 1) rows (in + out) numbers instead of 2 (N - 1) / N in out, and each rank multiplies all ranks' rows.
*Invariants*: N ranks equal one process on the global batch; replicas stay bit-equal; all ranks send in one order.
*Source*: wait-free backpropagation and factors: Zhang et al. 2017 (arXiv 1706.03292), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline import contract, messages, transport
from paceline.codec.encoding.packing import MIN_BYTES, packed
from paceline.exchange.flow.autotuner import FORMS, PACKED, Autotuner
from paceline.exchange.flow.cost_model import coded_traffic
from paceline.exchange.flow.send_queue import InFlight, SendQueue, StepSends
from paceline.exchange.flow.together import begin, declared, together
from paceline.messages import (
    DENSE,
    FACTORS,
    Bucket,
    CodecRun,
    Coded,
    Collective,
    CommCost,
    Decision,
    ExchangeTraffic,
    Gradient,
    StepContext,
    StepOutcome,
    Tally,
    Vote,
)
from paceline.registry import CODEC, find


class Exchange(contract.Exchange):
    """``forms``: "measured"; "bytes", which never measures; or always "dense" or "factors" where possible.

    ``packed``: lossless compression: "measured", where the network is slow; "always"; "never". No sum changes by it.
    The codec's memory belongs to this rank and changes only when a step is applied.
    """

    overlaps: tuple[str, ...] = ("backward", "forward")
    _takes_factors = False
    _requested = _packed = "measured"
    own_codec: contract.Codec | None = None  # where it does not use the user's; None: the exact one
    factors = True

    def __init__(self, forms: str = "measured", packed: str = "measured"):
        if forms not in FORMS:
            raise ValueError(f"exchange 'allreduce': forms is one of {', '.join(FORMS)}, got {forms!r}")
        if packed not in PACKED:
            raise ValueError(f"exchange 'allreduce': packed is one of {', '.join(PACKED)}, got {packed!r}")
        self._requested, self._packed = forms, packed
        self.factors = forms != DENSE

    def open(
        self, engine: contract.Engine, link: transport.Link, codec: contract.Codec, rows: int = 1, seed: int = 0
    ) -> None:
        exact = find("codec", CODEC)
        codec, buckets = codec if self.uses_codec else self.own_codec or exact, engine.buckets
        self.buckets, self.codec, self.link = buckets, codec, link
        self._takes_factors = engine.optimizer_takes_factors
        self.codecs = {DENSE: codec, FACTORS: self.factor_codec or exact}
        self.fidelity, self.seed, self.step = codec.fidelity, seed, 0
        self.memory = {bucket.index: codec.init(bucket, seed) for bucket in buckets}
        self.choice = Autotuner(
            *(buckets, link.size, self.codecs, self._requested, rows, self._takes_factors),
            *(self.overlap == "forward", self._packed, link.cost),
        )
        self.choice.multiply_by, self.choice.num_multipliers = self.multiply, self.num_multipliers
        self._start()

    def _start(self) -> None:
        self._lane = self.link.lane("gradients") if self.link.size > 1 else self.link
        self._flow = SendQueue(self._encode, self._begin, self.link.threads) if self.link.size > 1 else None
        self._flight = StepSends(self.choice.groups, self.step, self.choice.packed, self.choice.high_bandwidth)
        self._before: tuple[StepSends, list[CommCost]] | None = None  # the last step, where sums arrive after its vote
        self._received: list[tuple[Gradient, Any]] = []

    def forms(self) -> Sequence[str]:
        return self.choice.forms

    def explain(self) -> Sequence[str]:
        return self.choice.why

    def begin(self) -> None:
        self._flight = StepSends(self.choice.groups, self.step, self.choice.packed, self.choice.high_bandwidth)

    def put(self, gradient: Gradient) -> None:
        self.choice.types[gradient.bucket.index] = gradient.kind
        if self._flow and self.overlap == "forward" and gradient.layer_input is not None:
            # it may be sent after the step, when a script already overwrites its input
            gradient.layer_input = gradient.layer_input.clone()
        if self._flow:
            self._flow.offer(self._flight, gradient)
        else:
            self._flight.offered[gradient.bucket.index] = 0.0
            self._flight.waiting[gradient.bucket.index] = gradient

    def _encode(self, gradients: Sequence[Gradient], flight: StepSends) -> InFlight:
        first, size = gradients[0], self.link.size
        kind = DENSE if first.output_grad is None else FACTORS
        bucket = first.bucket if first.output_grad is None else first.bucket.as_factors(len(first.output_grad))
        context = StepContext(flight.step, self.link.rank, size)
        run = self._run(gradients, context)
        if flight.packed:
            run = packed(run, context, MIN_BYTES)
        return InFlight(gradients, run, len(self.codecs[kind].rounds(bucket, size, first.kind[0])))

    def _run(self, gradients: Sequence[Gradient], context: StepContext) -> Generator[Collective, Any, list[Coded]]:
        """The collectives of one message, which return the sums: of several dense gradients, or of one as factors."""
        runs, first = list[CodecRun](), gradients[0]
        if first.output_grad is not None and first.layer_input is not None:
            both = torch.cat([first.output_grad, first.layer_input.to(first.output_grad.dtype)], dim=1)
            runs.append(declared(self.codecs[FACTORS], first.bucket.as_factors(len(both)), both, None, context))
        for gradient in gradients if not runs else ():
            bucket, flat = gradient.bucket, gradient.flat
            assert flat is not None
            runs.append(declared(self.codecs[DENSE], bucket, flat, self.memory[bucket.index], context))
        return (yield from together(runs))

    def _begin(self, collective: Collective, gradients: Sequence[Gradient], flight: StepSends) -> transport.Handle:
        self._lane.set_regime(flight.high_bandwidth)
        bucket, payload = gradients[0].bucket, collective.payload
        names = f"{', '.join(bucket.names[:2])}{' ...' if len(bucket.names) > 2 or len(gradients) > 1 else ''}"
        dense = gradients[0].output_grad is None
        what = f"sum of bucket {bucket.index}: {names}" if dense else f"all-gather of the factors of {names}"
        what += f" ({payload.nbytes / 1e6:.1f} MB)"
        return begin(collective, self._lane, what)

    def receive(self, flight: StepSends, bucket: Bucket) -> tuple[Gradient, Any]:
        """(the sum over all ranks, the codec's next state). Waits for it; called once for each bucket."""
        assert self._flow
        sent, place = self._flow.take(flight, bucket.index)
        coded = sent.coded[place]
        if sent.gradients[place].output_grad is None:
            return Gradient(bucket, flat=coded.total), coded.state
        out = bucket.shapes[0][0]
        return Gradient(bucket, output_grad=coded.total[:, :out], layer_input=coded.total[:, out:]), None

    def remember(self, sums: Sequence[tuple[Gradient, Any]], vote: Vote) -> None:
        """Commits the codec's state after these sums; of none where one is not finite: then no sum will be applied."""
        memory = {gradient.bucket.index: state for gradient, state in sums if gradient.flat is not None}
        if all(each is None for each in memory.values()):
            self.memory.update(memory)
        elif vote.weight and all(_is_finite(part) for gradient, _ in sums for part in gradient.parts):
            for i, after in memory.items() if self.codec.has_residual else ():
                memory[i] = self.codec.keep_unapplied(self.memory[i], after, self._unused(self.buckets[i], vote.used))
            self.memory.update(memory)

    def _unused(self, bucket: Bucket, used: bytes) -> list[slice]:
        """The slices of the bucket that belong to unused parameters: no optimizer applies their values."""
        first = sum(len(one.names) for one in self.buckets[: bucket.index])
        ends = list(accumulate(bucket.numels))
        return [
            slice(end - numel, end)
            for end, numel, in_use in zip(ends, bucket.numels, used[first : first + len(ends)], strict=True)
            if not in_use
        ]

    def collect(self, vote: Vote) -> Vote:
        if self._flow is None:
            return vote
        flight, later = self._flight, self.overlap == "forward"
        self._received = [] if later else [self.receive(flight, bucket) for bucket in self.buckets]
        measured = self._before[0] if later and self._before else flight
        vote.ready, vote.took = flight.ready(), measured.took()
        vote.multiply = self.choice.multiplication()
        return vote

    def finish(self, tally: Tally) -> StepOutcome:
        merged, votes = tally.vote, tally.votes
        if self._flow is None:
            return self._alone(merged)
        flight, later, received = self._flight, self.overlap == "forward", self._received
        self._received = []
        awaited: list[messages.PendingGradient] = [
            _PendingGradient(self, flight, self.buckets[i], merged) for group in flight.groups for i in group
        ]
        most = [max(vote.rows[bucket.index] for vote in votes) for bucket in self.buckets]
        costs = self.choice.costs(flight.groups, most)
        measured = self._before if later else (flight, costs)
        self.choice.learn(merged, self._moved(*measured) if measured else [])
        self._before = (flight, costs) if later else None
        redo = self.choice.needs_retry(merged, votes)
        if not merged.ok or redo:
            for bucket in self.buckets if later else ():
                self.receive(flight, bucket)  # these sums use the memory of gradients that the retry writes again
            return StepOutcome(Decision.RETRY, vote=merged, drift=tally.drift)
        self.step += 1
        if later:
            return StepOutcome(Decision.COMMIT, [], merged, tally.drift, awaited)
        if merged.finite:
            self.remember(received, merged)
        return StepOutcome(Decision.COMMIT, [gradient for gradient, _ in received], merged, tally.drift)

    def _moved(self, flight: StepSends, costs: list[CommCost]) -> list[CommCost]:
        """The costs with the bytes that messages had; equal on all ranks, which received the same messages."""
        others, actual = self.link.size - 1, flight.actual_bytes
        for group in flight.groups:
            whole = costs[group[0]].in_sequence
            left = others * actual[group[0]] / whole if whole and group[0] in actual else 1.0
            for i in group:
                self.choice.left[i] = left
        return [self.choice.gathered(actual[i]) if i in actual else cost for i, cost in enumerate(costs)]

    def _alone(self, vote: Vote) -> StepOutcome:
        gradients = [self._flight.waiting[bucket.index] for bucket in self.buckets]
        self._flight = StepSends(self.choice.groups, self.step)
        redo = self.choice.needs_retry(vote, [vote]) or not vote.ok
        return StepOutcome(Decision.RETRY if redo else Decision.COMMIT, [] if redo else gradients, vote)

    def on_assignment(self, largest: float) -> None:
        self.choice.on_assignment(largest)

    def traffic(self, dtype: torch.dtype) -> ExchangeTraffic:
        coded = coded_traffic(self.codec, self.buckets, dtype)
        return replace(coded, factors=self.factors, forward=self.overlap == "forward")

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "memory": self.memory, **self.choice.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.step, self.memory = state["step"], state.get("memory", self.memory)
        if "forms" in state:
            self.choice.load(state)
        elif "owing" in state:
            self.choice.keep_dense(state["owing"])

    def rebuild(self, link: transport.Link) -> None:
        self._stop()
        self.link = link
        self.memory = {
            bucket.index: self.codec.on_view_change(bucket, self.memory[bucket.index], self.seed)
            for bucket in self.buckets
        }
        self.choice.restart(link.size, link.cost)
        self._start()

    def close(self) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._flow:
            self._flow.close()


def _is_finite(values: Tensor) -> bool:
    """In one pass; `Tensor.isfinite` makes several tensors as large."""
    real = torch.view_as_real(values) if values.is_complex() else values
    return not real.numel() or all(bool(each.isfinite()) for each in real.aminmax())


class _PendingGradient(messages.PendingGradient):
    def __init__(self, exchange: Exchange, flight: StepSends, bucket: Bucket, vote: Vote):
        self.exchange, self.flight, self.bucket, self.vote = exchange, flight, bucket, vote

    def ready(self) -> bool:
        return self.exchange._flow is not None and self.exchange._flow.has(self.flight, self.bucket.index)

    def wait(self) -> Gradient:
        with self.exchange.link.waiting("what the last step agreed on"):
            gradient, pending = self.exchange.receive(self.flight, self.bucket)
        self.exchange.remember([(gradient, pending)], self.vote)
        return gradient
