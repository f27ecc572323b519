"""Data types of a step: buckets, gradients, collectives, votes, outcomes and updates."""

from __future__ import annotations

import enum
import itertools
import math
import operator
import struct
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the planner uses these types without the seconds that importing torch takes
    import torch
    from torch import Tensor

DENSE, FACTORS = "dense", "factors"
SUM, MAX, ALL_GATHER, REDUCE_SCATTER, SHIFT = "sum", "max", "all-gather", "reduce-scatter", "shift"
RowRange = tuple[int, int]  # rows of a weight: (first, end); end 0: all rows
Shard = tuple[str, int, int]  # values of a weight, in the order of a contiguous tensor: (name, first, end)


class Decision(enum.Enum):
    COMMIT = "apply"  # the update is applied
    RETRY = "redo"  # all state is rolled back; the same global batch is computed again
    SKIP = "skip"  # all state is rolled back; the next batch follows


@dataclass(frozen=True)
class Bucket:
    """The unit of communication: a large parameter, or several small ones. Fixed at the start, in backward order."""

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    linear: bool = False  # one fully-connected weight (out, in), whose gradient may be sent as factors
    kind: str = DENSE  # FACTORS: both factors of a layer's gradient, side by side: (rows, out + in)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self.shapes))

    @cached_property
    def numel(self) -> int:
        return sum(self.numels)

    def fits(self, num_rows: int) -> bool:
        """Whether factors of so many rows fit into the buffer of the gradient."""
        return num_rows * sum(self.shapes[0]) <= self.numel

    def as_factors(self, num_rows: int) -> Bucket:
        """This layer's bucket as factors of so many rows."""
        return Bucket(self.index, self.names, ((num_rows, sum(self.shapes[0])),), kind=FACTORS)


@dataclass(frozen=True)
class Round:
    """A collective that a codec will run, known before the step, of at most ``max_bytes`` per rank. ``even``: of as
    many bytes on every rank."""

    operation: str
    max_bytes: int
    even: bool = True


@dataclass(frozen=True)
class Collective:
    """A collective that a codec runs now. Its result: the sum, or the largest values, in the payload's memory; every
    rank's payload, in rank order; this rank's slice of the sum of (size, n) values; the payload of the rank before."""

    operation: str
    payload: Tensor
    even: bool = True


@dataclass(frozen=True)
class StepContext:
    """What a codec may depend on beside values. ``wants_residual``: `Coded.residual` is, and may take their memory."""

    step: int
    rank: int
    size: int
    wants_residual: bool = False


@dataclass
class Coded:
    """The result of a codec. ``total``: the sum of all nodes' values, as all of them have it. ``state``: of the next
    step, if this one is applied. ``residual``: what of this node's values is not in the total; None: nothing."""

    total: Tensor
    state: Any = None
    residual: Tensor | None = None


CodecRun = Generator[Collective, Any, Coded]


class Gradient:
    """The gradient of one bucket. *Shapes*: flat (numel,), or output_grad (rows, out) with layer_input (rows, in).

    With factors the layer's gradient is ``output_grad.T @ layer_input``, exactly. The receiver owns ``flat``: an
    exchange adds into it. ``grads``: a gradient per parameter, until `flat` concatenates them.
    """

    def __init__(
        self,
        bucket: Bucket,
        flat: Tensor | None = None,
        output_grad: Tensor | None = None,
        layer_input: Tensor | None = None,
        grads: Sequence[Tensor] | None = None,
    ):
        self.bucket, self._flat, self.grads = bucket, flat, grads
        self.output_grad, self.layer_input = output_grad, layer_input
        # where the order of sums is fixed: partial sums, by their range of virtual shards
        self.sums: dict[tuple[int, int], Tensor] | None = None
        self.span, self.num_virtual_shards = (0, 0), 0

    @property
    def flat(self) -> Tensor | None:
        if self.grads is not None:
            import torch

            parts = [grad.reshape(-1).to(self.grads[0].device) for grad in self.grads]
            self._flat, self.grads = parts[0] if len(parts) == 1 else torch.cat(parts), None
        return self._flat

    @property
    def parts(self) -> list[Tensor]:
        """The gradient, or both its factors."""
        return [each for each in (self.flat, self.output_grad, self.layer_input) if each is not None]

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        """The dtype and device."""
        own = (*(self.grads or ()), self._flat, self.output_grad, *(self.sums or {}).values())
        some = next((each for each in own if each is not None), None)
        some = self.flat if some is None else some
        assert some is not None
        return some.dtype, some.device


@dataclass
class Vote:
    """A rank's vote on a step, and the data that all ranks need. A few hundred bytes; every rank sends one."""

    ok: bool = True
    finite: bool = True
    constant: bool = False  # the loss is not 0, but does not depend on a trainable parameter
    loss_sum: float = 0.0
    metric_sum: float = 0.0
    samples: int = 0  # of this rank in the gradient, where an assignment divides the batch
    weight: float = 0.0  # the divisor of the loss: number of samples or tokens, or the sum of a mask
    expected: float = 0.0  # the weight of all ranks together, known before the step: backward divides by it
    seconds: float = 0.0  # of computation
    busy: float = 0.0  # seconds of this step without the waits for other nodes
    fixed: float = 0.0  # the part of ``busy`` that does not depend on the rows: the update
    multiply: float = 0.0  # seconds per FLOP of computing a gradient from factors; 0: not measured
    squares: float = 0.0  # the sum of squares of this node's part of the gradient, where each node has a part
    hash: int = 0  # of a slice of the weights before the step; equal on all replicas
    options: int = 0  # checksum of the optimizer's options
    options_differ: bool = False  # of merged votes: these checksums differ
    stop_signal: int = 0  # a signal that requests the end of training after this step
    launcher_lost: bool = False  # this process has lost its launcher; training ends where all processes have
    join_generation: int = 0  # in which joining nodes are admitted, before the next step; 0: no node waits
    state_streaming: bool = False  # rank 0 streams its state, and each step's sums, to a joining node
    idle: bool = False  # this process had no samples in this step
    moves: int = 0  # buffers and frozen parameters that forward changes, as far as known
    source: int = 0  # the first process that had samples
    metric_tensors: bool = False  # the metric has tensors, which are sent after the vote
    terms: tuple[float, ...] = ()  # the sum of each loss component
    used: bytes = b""  # per parameter: 1 if it got a gradient
    dense: bytes = b""  # per bucket: 1 if factors were not its whole gradient
    rows: tuple[int, ...] = ()  # per bucket: rows that its factors have, or would have
    ready: tuple[float, ...] = ()  # per bucket: seconds from the first bucket's gradient to this one's
    took: tuple[float, ...] = ()  # per bucket: seconds of communication, without queueing; 0: sent with another
    paces: tuple[tuple[float, float], ...] = ()  # of a vote's result, per node: (busy, fixed)
    shares: tuple[tuple[float, float, float], ...] = ()  # per virtual share: its loss, metric and weight

    # a rank without rows does not know the number of terms, but all votes of a step must have the same size
    MAX_TERMS = 32
    NO_SOURCE = (1 << 32) - 1  # in ``source``

    _HEAD = struct.Struct("<???ddIdddddddqI?B?I??II?IIIIIII")
    _SHARE = struct.Struct("<ddd")

    def pack(self) -> bytes:
        parts = self.used, self.dense, self.rows, self.terms, self.paces, self.ready, self.took
        head = self._HEAD.pack(*_scalars(self), *map(len, parts))
        paces = itertools.chain.from_iterable(self.paces)
        shape = f"<{len(self.rows)}I{len(self.ready) + len(self.took)}f{len(self.terms) + 2 * len(self.paces)}d"
        numbers = struct.pack(shape, *self.rows, *self.ready, *self.took, *self.terms, *paces)
        shares = b"".join(self._SHARE.pack(*share) for share in self.shares)
        return head + self.used + self.dense + numbers + bytes(8 * max(0, self.MAX_TERMS - len(self.terms))) + shares

    @classmethod
    def unpack(cls, data: bytes) -> Vote:
        *scalars, num_used, num_dense, num_rows, num_terms, num_nodes, num_ready, num_took = cls._HEAD.unpack_from(data)
        a = cls._HEAD.size
        b = a + num_used
        c = b + num_dense
        shape = f"<{num_rows}I{num_ready + num_took}f{num_terms + 2 * num_nodes}d"
        numbers = iter(struct.unpack_from(shape, data, c))
        end = c + struct.calcsize(shape) + 8 * max(0, cls.MAX_TERMS - num_terms)

        def take(count: int) -> tuple[Any, ...]:
            return tuple(itertools.islice(numbers, count))

        tail: dict[str, Any] = {
            "used": data[a:b],
            "dense": data[b:c],
            "rows": take(num_rows),
            "ready": take(num_ready),
            "took": take(num_took),
            "terms": take(num_terms),
            "paces": tuple(take(2) for _ in range(num_nodes)),
            "shares": tuple(cls._SHARE.iter_unpack(data[end:])),
        }
        return cls(*scalars, **tail)

    @staticmethod
    def merge(votes: Sequence[Vote]) -> Vote:
        """All votes as one, in rank order: sums, unions, maxima of times, and ok only if all are. Raises ValueError, in
        every process that merges them, if they are of different batches."""
        first = votes[0]
        if any(b.expected != first.expected for b in votes):
            raise ValueError(
                f"the processes have batches of {', '.join(f'{b.expected:g}' for b in votes)} rows in the same step; "
                f"give each process the whole dataset, which pace.batches divides, or give pace.step each process's "
                f"own rows of one global batch"
            )
        merged = Vote(
            ok=all(b.ok for b in votes),
            finite=all(b.finite for b in votes),
            constant=any(b.constant for b in votes),
            loss_sum=sum(b.loss_sum for b in votes),
            metric_sum=sum(b.metric_sum for b in votes),
            samples=sum(b.samples for b in votes),
            weight=sum(b.weight for b in votes),
            expected=first.expected,
            seconds=max(b.seconds for b in votes),
            busy=max(b.busy for b in votes),
            fixed=max(b.fixed for b in votes),
            multiply=max(b.multiply for b in votes),
            squares=sum(b.squares for b in votes),
            hash=first.hash,
            options=first.options,
            options_differ=any(b.options_differ or b.options != first.options for b in votes),
            stop_signal=max(b.stop_signal for b in votes),
            launcher_lost=all(b.launcher_lost for b in votes),
            join_generation=max(b.join_generation for b in votes),
            state_streaming=any(b.state_streaming for b in votes),
            idle=any(b.idle for b in votes),
            moves=max(b.moves for b in votes),
            source=min(b.source for b in votes),
            metric_tensors=any(b.metric_tensors for b in votes),
            # a process without rows has no terms
            terms=tuple(sum(column) for column in itertools.zip_longest(*(b.terms for b in votes), fillvalue=0.0)),
            used=bytes(max(column) for column in zip(*(b.used for b in votes), strict=True)),
            dense=bytes(max(column) for column in zip(*(b.dense for b in votes), strict=True)),
            rows=tuple(sum(column) for column in zip(*(b.rows for b in votes), strict=True)),
            ready=tuple(max(column) for column in zip(*(b.ready for b in votes), strict=True)),
            # the last rank to enter a collective waits for no other: its time is that of the communication
            took=tuple(min(column) for column in zip(*(b.took for b in votes), strict=True)),
        )
        if first.shares:  # each is of one rank, and 0 in all others: losses are added in a fixed order, too
            merged.shares = tuple(map(_added_up, zip(*(b.shares for b in votes), strict=True)))
            merged.loss_sum, merged.metric_sum, merged.weight = _added_up(merged.shares)
        return merged

    @property
    def trains_nothing(self) -> bool:
        """Whether this process's share has a loss, but no parameter got a gradient."""
        return bool(self.weight and self.loss_sum) and 1 not in self.used


def _added_up(shares: Iterable[tuple[float, float, float]]) -> tuple[float, float, float]:
    loss, metric, weight = (sum(column) for column in zip(*shares, strict=True))
    return loss, metric, weight


# the fields of a vote that are one number each, in the order of `Vote._HEAD`
_scalars = operator.attrgetter(*itertools.takewhile(lambda name: name != "terms", Vote.__dataclass_fields__))


@dataclass
class Tally:
    """The result of a vote: the merged vote, each node's vote, and whether the replicas' hashes differ."""

    vote: Vote
    votes: list[Vote]
    drift: bool = False


class PendingGradient:
    """A gradient of a committed step that may not have arrived yet."""

    bucket: Bucket

    def ready(self) -> bool:
        raise NotImplementedError

    def wait(self) -> Gradient:
        """Called once. Raises LinkError."""
        raise NotImplementedError


@dataclass
class StepOutcome:
    """The outcome of a step on every rank: the decision, all gradients in order, and the merged vote. ``pending``:
    instead of gradients, where the update may be deferred; in the order of arrival."""

    decision: Decision
    gradients: list[Gradient] = field(default_factory=list)
    vote: Vote = field(default_factory=Vote)
    drift: bool = False  # the replicas' hashes differ
    pending: list[PendingGradient] = field(default_factory=list)


@dataclass(frozen=True)
class UpdateRule:
    """How the global sums become an update. Normalised once: gradient = scale * sum."""

    scale: float = 1.0
    clip: float | None = None  # global norm
    check: bool = False  # change nothing if the gradient is not finite
    step: int = 0  # the step's number, for messages
    squares: float = 0.0  # of the whole sum, where each node has a part of it


@dataclass(frozen=True)
class Target:
    """New values of a weight, or of the optimizer's tensor ``key`` for it: from ``first`` on, in the flat order of a
    contiguous tensor. ``weight``: its index in `Engine.weights`."""

    weight: int
    values: Tensor
    first: int = 0
    key: str = ""


@dataclass(frozen=True)
class Update:
    """An update of the weights, which only `Engine.apply` executes. Targets are written after gradients are applied.
    ``used``: 1 for each parameter that any backward pass reached. ``pending``: instead of gradients, if deferred."""

    gradients: Sequence[Gradient] = ()
    used: bytes = b""
    rule: UpdateRule = UpdateRule()
    pending: Sequence[PendingGradient] = ()
    targets: Sequence[Target] = ()

    @staticmethod
    def of(outcome: StepOutcome, rule: UpdateRule) -> Update:
        return Update(outcome.gradients, outcome.vote.used, rule, outcome.pending)


@dataclass(frozen=True)
class CommCost:
    """*Units*: sequential messages, bytes sent per rank, floating-point operations per rank."""

    steps: float
    bytes: float
    flops: float = 0.0

    def __add__(self, other: CommCost) -> CommCost:
        return CommCost(self.steps + other.steps, self.bytes + other.bytes, self.flops + other.flops)

    @property
    def in_sequence(self) -> float:
        """Bytes on the critical path, where a rank waits for data of another."""
        return self.bytes


@dataclass(frozen=True)
class ExchangeTraffic:
    """The communication pattern of an exchange and its codec. *Units*: bytes per value sent; 0: of the value's type.

    ``factors``: fully-connected layers may be sent as factors. ``copy_bytes``: more than two nodes send their Nth of
    the sum on, as a copy. ``gathers``: gradients are all-gathered, and every node sums them. ``every``: 0, or the
    period of weight averaging. ``forward``: communication may overlap with the next forward pass. ``loses``: a lossy
    codec, whose size does not count against factors. ``coding_s``: its seconds per value; ``rounds``: its collectives
    per bucket. ``norm_sums``, ``norm_numel``: all-reduces of batch norm per step, and their values.
    """

    factors: bool = True
    dense_bytes: float = 0.0
    factor_bytes: float = 0.0
    copy_bytes: float = 0.0
    gathers: bool = False
    every: int = 0
    forward: bool = False
    loses: bool = False
    coding_s: float = 0.0
    rounds: float = 1.0
    norm_sums: int = 0
    norm_numel: int = 0
