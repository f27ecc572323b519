"""Every promise between rooms. What they hand each other is in `values`.

A step reads: an Engine turns this node's share of the batch into Pieces, an Exchange agrees on them
over a Link (each piece dressed by a Codec), and the Verdict says whether the step happened.

The network only ever adds: losses, weights, gradients. Backward runs on the loss *sum* times a
constant known before the step (1 / expected weight); what was agreed is corrected once, afterwards.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.messages import (
    DENSE,
    FACTORS,
    FIDELITY,
    Bucket,
    CheckpointError,
    CommCost,
    Decision,
    Gradient,
    Joiner,
    LinkError,
    NeverStepped,
    NoGradient,
    NotFinite,
    PendingGradient,
    RowRange,
    StepOutcome,
    Tally,
    Target,
    UnlikeOptions,
    Update,
    UpdateRule,
    ViewChange,
    Vote,
    pack_frames,
    unpack_frames,
)

__all__ = [
    "DENSE",
    "FACTORS",
    "FIDELITY",
    "Board",
    "Bucket",
    "CheckpointError",
    "Codec",
    "Collectives",
    "CommCost",
    "Control",
    "Decision",
    "Detect",
    "Engine",
    "Exchange",
    "FailureDetector",
    "GlobalBatch",
    "Gradient",
    "Handle",
    "Joiner",
    "Link",
    "LinkError",
    "Membership",
    "NeverStepped",
    "NoGradient",
    "NotFinite",
    "PendingGradient",
    "RowRange",
    "Share",
    "StepObserver",
    "StepOutcome",
    "StepSummary",
    "Tally",
    "Target",
    "Threads",
    "UnlikeOptions",
    "Update",
    "UpdateRule",
    "View",
    "ViewChange",
    "Vote",
    "Waits",
    "pack_frames",
    "unpack_frames",
]


class Handle:
    """An operation under way. ``wait`` returns its result or raises LinkError at the deadline."""

    def wait(self, deadline_s: float | None = None) -> Any:
        raise NotImplementedError

    def done(self) -> bool:
        raise NotImplementedError


class Threads:
    """Where an exchange's threads come from, and the clock that it measures by: Python's, or those of a simulation."""

    Thread: Any = threading.Thread
    Condition: Any = threading.Condition
    Queue: Any = queue.Queue

    def now(self) -> float:
        """*Units*: seconds since any time."""
        return time.perf_counter()


class Share(Protocol):
    """Whose part of a batch is meant: a process's place among all, with the rows that it is dealt (`data.sampler`)."""

    @property
    def node(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def virtual(self) -> int: ...
    @property
    def least(self) -> int: ...
    @property
    def whole(self) -> int: ...
    @property
    def span(self) -> tuple[int, int]: ...

    def rows(self, count: int) -> range: ...

    def dealt(self, count: int) -> tuple[int, ...]: ...


class GlobalBatch:
    """What all processes compute in one step. ``weight``: its number of rows, known before anybody computes.

    ``epoch``, ``step``, ``num_steps``: its place in the data, and the steps of its epoch, where they are known.
    ``wait_s``: seconds for which its rows were waited for, so far. ``dealt``: whether seats say whose its rows are.
    ``num_local_samples``: how many `share` gave here, where that is known.
    """

    weight: float
    epoch: int | None = None
    step: int | None = None
    num_steps: int | None = None
    ends_epoch = False
    wait_s = 0.0
    assigned = False
    num_local_samples: int | None = None

    def share(self, assignment: Share) -> Any:
        """The seat's rows, or None if it has none."""
        raise NotImplementedError


class Engine:
    """How one node turns its share of a batch into a gradient, and a gradient into an update."""

    fidelity = "exact"
    optimizer: torch.optim.Optimizer
    buckets: tuple[Bucket, ...] = ()
    weights: Sequence[Tensor] = ()  # every trainable parameter, in the order of `names`
    names: tuple[str, ...] = ()
    # each parameter's in the optimizer's state_dict; none where it holds other things
    optimizer_index: Mapping[str, int] = {}
    optimizer_takes_factors: bool = False  # the optimizer takes a layer's factors instead of its gradient
    local_place: tuple[int, int] = (0, 1)  # which of how many parts of the node's share this process computes
    # (into, left, right): what an update does with a layer's factors, momentum left out
    multiply: Callable[[Tensor, Tensor, Tensor], Any] = staticmethod(Tensor.addmm_)
    norm: float | None = None  # of the whole gradient at the last update, where the rule asked for it
    terms: tuple[str, ...] = ()  # the names of the loss's parts, where it has any
    accumulate: int = 1  # micro-batches that a share is computed in
    num_local_samples: int | None = None  # samples of the share that comes next, where they are dealt
    still: Mapping[str, tuple[int, int]] = {}  # marks of the parameters that do not train, as they were when all joined
    num_virtual_shards: int = 0  # virtual shares that a global batch is always dealt in; 0: it is dealt row by row
    seed: int = 0  # of what virtual shares draw
    may_retry: bool = False  # a step may be computed again after its pieces have left
    hint: str = ""  # what the last gradient has shown that users should know
    divided: bool = False  # a global batch is computed in several parts, here or elsewhere
    defers_updates: bool = False  # may begin the next step while pieces of the last are still coming
    # read by `registry.says`, before anything is imported:
    counts: str = ""  # what the k of NAME:k counts: a "thread", a "copy" of the model, a "share" of a batch
    starts_processes: bool = False  # each copy is a process of the script, which a launcher starts
    planned: bool = False  # a plan tries its rows, and predicts them
    reproduces: bool = False  # the same bits for any number of nodes, over an exchange of a fixed order
    environment: Mapping[str, str] = {}  # of its processes, where users have not said otherwise

    @property
    def waited_s(self) -> float:
        """Seconds, so far, in which `gradient` waited for other processes in the middle of its work."""
        return 0.0

    def open(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Any] | None,
        metric: Callable[..., Any] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def buffers(self) -> Sequence[Tensor]:
        """The model's dense buffers as they are now: forward may have put other tensors in their place."""
        raise NotImplementedError

    @property
    def pids(self) -> Sequence[int]:
        """The processes of this node, as far as this one knows them."""
        return (os.getpid(),)

    @property
    def division(self) -> str:
        """How the optimizer's work is divided on this node: "one process", "slices" or "whole tensors"."""
        return "one process"

    @property
    def precision(self) -> str:
        """What forward and backward compute in: fp32, bf16 or fp16."""
        return "fp32"

    def local_exchange(
        self, exchange: Exchange, control: Control, alone: bool, activity: Waits
    ) -> tuple[Exchange, Control]:
        """Both as this process sees them: themselves, or stand-ins where another process holds the link.

        ``alone``: there is no other node, and none comes later.
        """
        return exchange, control

    def begin_step(self, assignment: Share, step: int) -> None:
        """Told before each gradient: whose rows these will be, and of which step."""

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """(the batch where the model is, the model's output)."""
        raise NotImplementedError

    def sync_norm(self, link: Link | None) -> None:
        """From now on batch norm in `gradient` is over the rows of all processes; ``link`` is local rank 0's, if any.

        Every process of every node must call it, after `open`.
        """
        raise NotImplementedError

    def reopen(self, link: Link | None) -> None:
        """What `sync_norm` was given has been rebuilt: its sums go over ``link`` from the next step on."""

    def gradient(self, batch: Any, scale: float, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Vote:
        """Gradient of ``scale * loss_sum`` over ``batch`` (None: no rows), offered piece by piece."""
        raise NotImplementedError

    def collect_gradients(self, vote: Vote, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Vote:
        """As `gradient`, with what the caller's own backward passes have left in ``.grad``; its sums in ``vote``."""
        raise NotImplementedError

    def apply(self, update: Update) -> bool:
        """The only writer of weights once all train. False if ``rule.check`` found the gradient not finite: nothing was
        changed. Every process of the node calls it, and one that holds the node's targets has them for all.

        With gradients that are still coming, True: they are applied while the next step's forward pass runs.
        """
        raise NotImplementedError

    def wait_pending(self) -> None:
        """Waits for pieces that are still coming, and applies them. Raises NotFinite, LinkError."""

    def options(self) -> list[dict[str, Any]]:
        """The numbers of each group of the optimizer, as JSON has them."""
        return []

    def compare_options(self, said: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
        """How these differ, each with whose they are; nothing where only roundings do."""
        return ""

    def diagnose(self, batch: Any, backward: bool = False) -> str:
        """Where in the forward pass over ``batch``, or backward, numbers first cease to be finite; empty if nowhere."""
        return ""

    def snapshot(self) -> Any:
        """All that ``gradient`` may change: buffers and random state. Weights change in `apply` alone."""
        raise NotImplementedError

    def rollback(self, kept: Any) -> None:
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's whole ``state_dict``. Every process of the node must call it."""
        raise NotImplementedError

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Takes a whole ``state_dict``, the same on every process of the node."""
        raise NotImplementedError

    def optimizer_rows(self, windows: Mapping[str, RowRange]) -> dict[str, dict[str, Any]]:
        """Of the optimizer's state what belongs to these rows of these parameters, by their names in `optimizer_index`.

        Every process of the node must call it.
        """
        raise NotImplementedError

    def take_optimizer_rows(self, states: Mapping[str, Mapping[str, Any]], windows: Mapping[str, RowRange]) -> None:
        """What `optimizer_rows` gave elsewhere. Every process of the node must call it."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class Channel(Protocol):
    """For much, to one node that comes late."""

    def send(self, parts: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Raises LinkError where the node is gone."""

    def hurry(self) -> None:
        """All others wait from now on: what takes long is given up, though bytes leave."""

    def close(self) -> None: ...


class JoinDesk:
    """Speaks for the members to nodes that come late, which have proved that they belong to the run.

    ``glance`` is called while this process, cut off from the other members, waits for them: it may raise.
    """

    glance: Callable[[], None] = staticmethod(lambda: None)

    def waiting(self) -> dict[str, dict[str, Any]]:
        """What each of them asks, by its name."""
        raise NotImplementedError

    def answer(self, name: str, said: dict[str, Any]) -> None:
        raise NotImplementedError

    def line(self, name: str) -> Channel:
        """That by which it came last. Raises LinkError where it does not come."""
        raise NotImplementedError


def boottime_s() -> float:
    """Seconds, also those in which the machine was suspended, where that can be told."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class FailureDetector(Protocol):
    """Who of a link's ranks is lost, and what each of them is at.

    ``dead``: how each was lost; ``left``: who has ended in peace.
    """

    dead: dict[int, str]
    left: set[int]

    def verdict(self, grace_s: float) -> int | None:
        """The first rank known to be dead, waiting up to ``grace_s`` to learn of one."""

    def still_member(self, since: float) -> bool:
        """Whether the others have not given this process up, as far as it stood still ``since`` then, by
        `boottime_s`."""

    def peer_status(self) -> dict[int, dict[str, Any]]:
        """What each rank is at, as it said last."""

    def peer_stack(self, rank: int) -> str:
        """Where the thread that trains on ``rank`` stands in its code; empty where that is not to be had."""

    def abandon(self) -> None:
        """Ends without a word, so that whoever is still in an operation of this link learns that it is dead."""

    def close(self) -> None:
        """Leaves in peace."""


class Board(Protocol):
    """Where ranks leave words for each other by a key, before they are connected."""

    def set(self, key: str, word: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


# rank, size, board, this rank's address, the run's secret; what is called while it waits, and may raise
Detect = Callable[[int, int, Board, str, bytes, Callable[[], None]], FailureDetector]


class Waits(Protocol):
    """Where this process notes what it is at, and for whom it waits (`report.activity.Activity`)."""

    host: str
    step: int
    notice: Callable[[str], None]
    siblings: Callable[[], str]

    @property
    def limit_s(self) -> float: ...

    def waiting(self, what: str) -> AbstractContextManager[None]: ...

    def at(self, what: str) -> AbstractContextManager[None]: ...


class Collectives:
    """MPI's collectives and messages, on one lane in one order; handles are asynchronous."""

    rank: int = 0
    size: int = 1

    def sum(self, tensor: Tensor, what: str = "sum") -> Handle:
        """Adds all ranks' tensors into each, in the tensor's own type. Result: the tensor."""
        raise NotImplementedError

    def max(self, tensor: Tensor, what: str = "max") -> Handle:
        raise NotImplementedError

    def all_gather(self, tensor: Tensor, what: str = "all-gather", even: bool = False) -> Handle:
        """Result: every rank's tensor, in rank order. First dimensions may differ unless ``even``."""
        raise NotImplementedError

    def reduce_scatter(self, tensor: Tensor, what: str = "reduce-scatter") -> Handle:
        """Result: this rank's slice of the sum. *Shapes*: (size * n, ...) in, (n, ...) out."""
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, root: int = 0, what: str = "broadcast") -> Handle:
        raise NotImplementedError

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Handle:
        raise NotImplementedError

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Handle:
        raise NotImplementedError


class Link(Collectives):
    """How bytes move among a fixed group of ranks. Who they are is for `Membership` to say."""

    generation: int = 0
    hosts: Sequence[str] = ("",)
    sent_bytes: int = 0
    threads: Threads = Threads()
    accumulates_fp32: bool = False  # 16-bit floats are added in 32 bits
    high_bandwidth: bool = False  # a byte costs more on processors than on the wire
    activity: Waits | None = None  # told of every wait
    detector: FailureDetector | None = None
    # read by `registry.says`, before anything is imported:
    networked: bool = True  # between nodes
    hides: bool = False  # everything is encrypted
    admits: bool = True  # a node may come late
    by_all: bool = False  # who comes late must have asked for it as well
    finds_others: bool = False  # without a host to meet at
    started_by: tuple[str, str] = ("", "")  # taken unasked where these variables are a node's rank and their number
    on_cpu: bool = False  # carries nothing from a GPU's memory
    package: tuple[str, str] = ("", "")  # that it needs, and the extra that brings it

    def lane(self, name: str) -> Link:
        """The same ranks with an order of their own."""
        raise NotImplementedError

    def set_regime(self, quick: bool) -> None:
        """What is gathered from now on goes as is best over a quick wire, or a slow one: all ranks say the same."""
        self.high_bandwidth = quick

    def cost(self, operation: str, num_bytes: int) -> CommCost:
        """Messages in sequence and bytes sent per rank of one collective on ``num_bytes``."""
        raise NotImplementedError

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Within, this process waits for others."""
        return self.activity.waiting(what) if self.activity else nullcontext()

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class View:
    """Who takes part from now on. ``previous``: the rank that each had before, the new ones left out, who have the last
    ranks."""

    link: Link
    previous: tuple[int, ...]
    joined: tuple[Joiner, ...] = ()


class Membership:
    """Who takes part in a training, and the link between them, which is made anew when that changes.

    ``expects_joiners``: others come later, though there is one rank now.
    """

    link: Link
    expects_joiners: bool = False

    def stand_by(self, least: int = 1) -> None:
        """From now on a loss can be survived by `reconfigure`, with ``least`` ranks or more. Every rank calls it.

        Raises ValueError where it cannot.
        """
        raise ValueError("this link ends with the first node that it loses; set PACELINE_LINK to another")

    def reconfigure(self, admits: Sequence[Joiner] = ()) -> View:
        """Those who are left, in the old order, over a link of the next generation. Whoever waits on the old one fails.

        ``admits``, of rank 0: who is taken in. None of them is where a member is lost at the same time.

        Raises LinkError where this rank, or nobody, may go on.
        """
        raise LinkError("this link ends with the first node that it loses")

    def assert_still_member(self, since: float) -> None:
        """Called when an operation has ended, with when the one before did, by `boottime_s`. Raises LinkError where
        this process stood still in between, and the others went on without it: what it heard, they may not have."""

    def peer_status(self) -> dict[int, dict[str, Any]]:
        """What each rank is at, as it said last; nothing where ranks do not tell each other."""
        return {}

    def peer_stack(self, rank: int) -> str:
        """Where the thread that trains on ``rank`` stands in its code; empty where that is not to be had."""
        return ""

    @property
    def join_desk(self) -> JoinDesk | None:
        """Who answers the nodes that come late; None where none can. Rank 0's has the say."""
        return None


class Control:
    """Small words of all processes, in one order, besides the gradients: votes, sums, texts, rank 0's tensors.

    ``rank``, ``size``: of nodes. ``num_view_changes``: losses so far after which something was done again.
    """

    rank: int
    size: int
    generation: int
    tolerates_loss: bool = False  # a lost node ends nothing: a step may be computed again, by those who are left
    num_view_changes: int = 0
    on_view_change: Callable[[ViewChange], None] | None = None  # told of each loss before anything is done again

    def commit(self, vote: Vote, finish: Callable[[Tally], StepOutcome]) -> StepOutcome:
        """The vote on a step, once all its pieces are here. ``finish`` is called where it came through, even if for
        others alone. RETRY where it came through for nobody."""
        raise NotImplementedError

    def recover(self, error: LinkError) -> StepOutcome:
        """Instead of `commit`, after the link broke before it: RETRY, or raises ``error``."""
        raise error

    def transact(self, compute: Callable[[], Sequence[Target] | None]) -> Sequence[Target] | None:
        """What ``compute`` makes together with the others, once everyone has it; computed again where one is lost.

        None where it is; nothing for a process that does not hold the link.
        """
        return compute()

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sums of a few numbers over all processes, for evaluation and reports."""
        raise NotImplementedError

    def all_gather(self, *words: bytes) -> list[bytes]:
        """What every process has to say, in the order of nodes and their processes, to everyone.

        Between nodes it is given the words of all processes of a node; nodes may have unlike numbers of them.
        """
        raise NotImplementedError

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's tensors into everyone's."""
        raise NotImplementedError

    def node_broadcast(self, words: bytes | bytearray) -> bytes | bytearray:
        """What the process that holds the link has for all processes of this node."""
        return words

    def admit(self, joiners: Sequence[Joiner] = ()) -> None:
        """Between two steps: takes those in whom rank 0 names. Every process of every member must call it."""
        raise NotImplementedError

    def enter(self) -> None:
        """As one of those: from here on this process is one of all. Every process of the node must call it."""
        raise NotImplementedError


@dataclass(frozen=True)
class StepSummary:
    """A step that is over: its number, what came of it, and what it took.

    ``spent``: parts of ``seconds``, by name. ``sent_bytes``: by this rank. ``facts``: what the caller adds.
    """

    step: int
    batch: GlobalBatch
    outcome: StepOutcome
    seconds: float
    spent: dict[str, float]
    sent_bytes: int
    facts: dict[str, Any]


class StepObserver:
    """Told of every step, in every process that has it; all are told in one order, and none stands in for another.

    ``key``: under which a node that joins late is handed its `state`; empty: it has none.
    """

    key = ""

    def takes(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        """A step begins. Returns the batch, or as much of it as this training takes. ``own``: of a loop of the user's
        own, which has read it before."""
        return batch

    def reads(self, batch: GlobalBatch, own: bool) -> GlobalBatch:
        """Rows of a batch are about to be read: in a step, or before it by a loop of the user's own. Returns the batch,
        or as this training sees it."""
        return batch

    def offering(self, offer: Callable[[Gradient], None]) -> Callable[[Gradient], None]:
        """A gradient is about to be computed. Returns what takes its pieces."""
        return offer

    def votes(self, vote: Vote) -> None:
        """The gradient is computed; what this process is about to say of the step."""

    def again(self, step: int, outcome: StepOutcome) -> None:
        """All is as before the step, which is computed again next."""

    def applies(self, outcome: StepOutcome, rule: UpdateRule) -> Callable[[], None] | None:
        """Before a step's update; what is returned is called once it was applied."""
        return None

    def updated(self, outcome: StepOutcome) -> None:
        """The step is applied, or skipped. May raise, in all processes."""

    def averaged(self) -> None:
        """All nodes have the same weights again, where they do not agree on every step."""

    def ends(self, summary: StepSummary) -> None:
        """The step is over."""

    def state(self) -> Any:
        """What a node that joins late must know."""

    def load(self, state: Any) -> None:
        """What `state` gave elsewhere."""


class Codec:
    """What a gradient looks like on the wire. Its memory is a value: nothing here changes itself.

    ``sums``: payloads may be added on the wire (in their own type, ``wire``); else each rank's is
    gathered and decoded. ``needs_feedback``: loses mass unless wrapped by ``feedback``. ``has_residual``: its memory is
    to be sent yet.
    """

    fidelity = "exact"
    sums = True
    needs_feedback = False
    scaled = False  # of what is a power of two larger, it makes the same
    has_residual = False
    wire = "the gradient's own type"
    takes_over: tuple[str, ...] = ()

    def init(self, bucket: Bucket, rank: int, seed: int) -> Any:
        return None

    def encode(self, flat: Tensor, memory: Any, step: int) -> tuple[Tensor, Any]:
        """(payload, pending): ``pending`` becomes memory through ``settle`` if the step is applied."""
        raise NotImplementedError

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def commit(self, pending: Any, agreed: Tensor) -> Any:
        """The next memory. Called on COMMIT alone."""
        return pending

    def keep_unapplied(self, before: Any, after: Any, unused: Sequence[slice]) -> Any:
        """The next memory, where these values of what was agreed on were not applied."""
        return after

    def redistribute(self, memories: Sequence[Any], rank: int, size: int) -> Any:
        """This rank's memory of a bucket, of those that ``len(memories)`` ranks had: among as many, its own.

        Among others nothing that is owed may be lost or owed twice.
        """
        return memories[rank % len(memories)]

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        raise NotImplementedError


class Exchange:
    """How nodes agree on one step. ``consensus``: replicas are equal after each step, period, or eventually."""

    fidelity = "exact"
    consensus = "step"
    uses_codec = True
    factors: bool = False  # fully-connected layers may travel as such
    fixed_order: bool = False  # sums are the same bits whoever has computed which share of a batch
    gathers: bool = False  # each rank's gradients go to all others, who add up by themselves
    factor_dtype: torch.dtype | None = None  # of factors on the wire, where every node computes them in 16 bits
    overlap = "backward"  # "forward": a step ends with the vote, and its pieces arrive during the next
    overlaps: tuple[str, ...] = ("backward",)
    # how a node adds a product to a gradient, (into, left, right), and the processes that share in it
    multiply: Callable[[Tensor, Tensor, Tensor], Any] = staticmethod(Tensor.addmm_)
    num_multipliers: int = 1
    link: Link

    def open(
        self,
        buckets: Sequence[Bucket],
        link: Link,
        codec: Codec,
        rows: int = 1,
        seed: int = 0,
        optimizer_takes_factors: bool = False,
    ) -> None:
        """``optimizer_takes_factors``: the engine's optimizer takes factors, so that they pay even where nothing is
        sent."""
        raise NotImplementedError

    def forms(self) -> Sequence[str]:
        """DENSE or FACTORS per bucket, equal on all ranks; changes only by agreement."""
        raise NotImplementedError

    def explain(self) -> Sequence[str]:
        """A line for each fully-connected layer: how its gradient travels, and why. Changes with the forms alone."""
        return ()

    def begin(self) -> None:
        """Called before each gradient is computed."""

    def put(self, gradient: Gradient) -> None:
        """Takes a piece, in any order; pieces leave in the order of their buckets."""
        raise NotImplementedError

    def collect(self, vote: Vote) -> Vote:
        """Waits until every piece of the step is here: who votes has them all. What this node votes."""
        raise NotImplementedError

    def finish(self, tally: Tally) -> StepOutcome:
        """What has come of the step, with its vote. Only here a codec's memory moves."""
        raise NotImplementedError

    def average(self, weights: Sequence[Tensor], now: bool) -> Sequence[Target] | None:
        """What all weights become, of schemes that do not agree on every step; None where nothing is due.

        Called after each update; ``now``: all are to have the same weights, to be saved, evaluated, or the last ones.
        May be called again, among others, before `averaged`.
        """
        return None

    def averaged(self) -> None:
        """Everyone has what `average` gave: it is about to be applied."""

    def dealt(self, largest: float) -> None:
        """From the next step on the busiest node has this part of all rows. Every process calls it between steps."""

    def cost(self, buckets: Sequence[Bucket], rows: int, size: int) -> CommCost:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass

    def rebuild(self, link: Link) -> None:
        """Over another link from now on: other ranks, next generation. Memory of this rank is kept."""
        raise NotImplementedError

    def close(self) -> None:
        pass
