"""Interfaces between rooms (subpackages). Their data types are in `messages`, membership and links in `transport`.

An Engine turns this node's share of a batch into Gradients, an Exchange all-reduces them over a Link (each encoded by a
Codec), and the Decision tells whether the step is applied. The network only ever adds: backward runs on the loss *sum*
times a constant known before the step (1 / expected weight); the global sum is normalised once, afterwards.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import errors
from paceline.messages import (
    DENSE,
    Bucket,
    CodecRun,
    ExchangeTraffic,
    Gradient,
    Round,
    RowRange,
    Shard,
    StepContext,
    StepOutcome,
    Tally,
    Target,
    Update,
    Vote,
)
from paceline.transport import Control, Link, Waits

Loss = Callable[..., Any]  # of the model's output and a batch; a metric likewise


class Share(Protocol):
    """A process's position among all, and its rows of a batch (`data.sampler.Assignment`)."""

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

    def rows_per_node(self, count: int) -> tuple[int, ...]: ...


class GlobalBatch:
    """The batch that all processes compute together in one step. ``weight``: its number of rows, known in advance.

    ``epoch``, ``step``, ``num_steps``: its position in the data, and the steps of its epoch, where known. ``wait_s``:
    seconds of waiting for its rows. ``assigned``: an `Assignment` divides them. ``num_local_samples``: of `share`.
    """

    weight: float
    epoch: int | None = None
    step: int | None = None
    num_steps: int | None = None
    ends_epoch, wait_s, assigned = False, 0.0, False
    num_local_samples: int | None = None

    def share(self, assignment: Share) -> Any:
        """The rows of this assignment, or None if it has none."""
        raise NotImplementedError


class EngineTraits:
    """Traits of an engine. `registry.says` reads literal values from the source, without an import."""

    fidelity = "exact"
    counts: str = ""  # what the k of NAME:k counts: a "thread", a "copy" of the model, a "share" of a batch, a "stage"
    starts_processes: bool = False  # each copy is a process of the script, which a launcher starts
    composes: bool = False  # may compute the gradient of each process of another engine: "processes:2/pipeline:2"
    micros_per_stage: int = 1  # micro-batches of a process's rows, for each of its k stages
    turn_s: float = 0.0  # seconds that a stage needs for each pass of a micro-batch, beside its computation
    planned: bool = False  # the planner predicts and measures its configurations
    reproduces: bool = False  # the same bits for any number of nodes, over an exchange of a fixed order
    environment: Mapping[str, str] = {}  # of its processes, where users have not set it
    optimizer_takes_factors: bool = False  # the optimizer takes a layer's factors instead of its gradient
    num_virtual_shards: int = 0  # into which each global batch is divided; 0: it is divided by rows
    may_retry: bool = False  # a step may be computed again after its gradients were sent
    defers_updates: bool = False  # may begin the next step before all gradients of the last one have arrived
    divided: bool = False  # a global batch is computed in several parts, in this process or in several
    accumulate: int = 1  # micro-batches in which a share is computed
    seed: int = 0  # of the random states of virtual shards


class DividedOptimizer:
    """An optimizer that updates these ``shards`` of the weights and no others, and has the state of no others, from
    `divide` until `assemble`. None: it holds the whole. State tensors of a weight's shape are cut as it is."""

    shards: Sequence[Shard] | None = None

    def divide(self, shards: Sequence[Shard]) -> None:
        raise NotImplementedError

    def values(self, shard: Shard) -> Tensor:
        raise NotImplementedError

    def state(self, shard: Shard) -> dict[str, Any]:
        raise NotImplementedError

    def assemble(self, states: Mapping[Shard, Mapping[str, Any]]) -> None:
        """``states``: of shards that are all weights together; none: the state is lost."""
        raise NotImplementedError


class EngineState(ABC):
    """The state of an engine: the parameters that it trains, and the optimizer's state."""

    optimizer: Optimizer
    buckets: tuple[Bucket, ...] = ()
    weights: Sequence[Tensor] = ()  # every trainable parameter, in the order of `names`
    names: tuple[str, ...] = ()
    # each parameter's index in the optimizer's state_dict; empty where the optimizer has other tensors
    optimizer_index: Mapping[str, int] = {}
    still: Mapping[str, tuple[int, int]] = {}  # fingerprints of the frozen parameters, from the time of `join`
    hint: str = ""  # a message for the user, from the last gradient

    @property
    @abstractmethod
    def buffers(self) -> Sequence[Tensor]:
        """The model's present dense buffers: forward may have replaced the tensors."""

    def options(self) -> list[dict[str, Any]]:
        """The options of each parameter group of the optimizer, as JSON values."""
        return []

    def compare_options(self, reported: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
        """How the options of these processes differ; empty where they differ only by rounding."""
        return ""

    @abstractmethod
    def state(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's complete ``state_dict``. Collective within the node."""

    @abstractmethod
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Loads a complete ``state_dict``, the same on every process of the node."""

    def divided_optimizer(self) -> DividedOptimizer:
        """For exchanges that divide its work between nodes. Raises ValueError for optimizers that cannot be divided."""
        raise ValueError("this engine has no optimizer whose work could be divided between nodes")

    def optimizer_rows(self, windows: Mapping[str, RowRange]) -> dict[str, dict[str, Any]]:
        """The optimizer's state for these rows of these parameters, by their names in `optimizer_index`. Collective
        within the node. Raises ValueError where it has none to give."""
        raise ValueError(f"engine {type(self).__module__} gives no rows of its optimizer's state")

    def take_optimizer_rows(self, states: Mapping[str, Mapping[str, Any]], windows: Mapping[str, RowRange]) -> None:
        """Loads the result of `optimizer_rows` of another node. Collective within the node. Raises ValueError as it
        does."""
        raise ValueError(f"engine {type(self).__module__} takes no rows of its optimizer's state")


class EngineOnNode(ABC):
    """One process of several on a node that form an engine; one of them holds the link to other nodes."""

    local_place: tuple[int, int] = (0, 1)  # (index, count) of the parts of the node's share: the part of this process
    metric_tensors: Mapping[str, Tensor] = {}  # of this process's last gradient: sums of the metric's tensors
    bucket_bytes: tuple[float, float] = (0, 0)  # the least of a bucket, and of a weight that may be sent as factors

    @property
    def pids(self) -> Sequence[int]:
        """The known processes of this node."""
        return (os.getpid(),)

    @property
    def division(self) -> str:
        """How the optimizer's work is divided on this node: "one process", "slices" or "whole tensors"."""
        return "one process"

    @property
    def waited_s(self) -> float:
        """Total seconds in which `gradient` waited for other processes during its computation."""
        return 0.0

    def local_exchange(
        self, exchange: Exchange, control: Control, alone: bool, activity: Waits
    ) -> tuple[Exchange, Control]:
        """Exchange and control for this process: the same objects, or proxies where another process holds the link.
        ``alone``: there is no other node, and none joins later."""
        return exchange, control

    @abstractmethod
    def sync_norm(self, link: Link | None) -> None:
        """Batch norm in `gradient` uses the rows of all processes from now on; ``link``: local rank 0's, if any.
        Every process of every node must call it, after `open`."""

    def reopen(self, link: Link | None) -> None:  # noqa: B027 an engine whose sums use no link has nothing to do
        """The link of `sync_norm` was rebuilt: its sums use ``link`` from the next step on."""


class Engine(EngineTraits, EngineState, EngineOnNode):
    """How one node turns its share of a batch into a gradient, and a gradient into an update."""

    # (into, left, right): how an update applies a layer's factors, without momentum
    multiply: Callable[[Tensor, Tensor, Tensor], Any] = staticmethod(Tensor.addmm_)
    norm: float | None = None  # of the whole gradient at the last update, where the rule needs it
    # the names in a vote's `terms`: of the loss's components; of the metric's values, a sum and a weight of each
    terms: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
    num_local_samples: int | None = None  # samples of the next share, where an assignment divides the batch

    @abstractmethod
    def open(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, metric: Loss | None = None) -> None: ...

    @property
    def precision(self) -> str:
        """The precision of forward and backward: fp32, bf16 or fp16."""
        return "fp32"

    def begin_step(self, assignment: Share, step: int) -> None:
        """Called before each gradient, with the assignment of its rows and the number of the step."""

    @abstractmethod
    def forward(self, batch: Any) -> tuple[Any, Any]:
        """(the batch on the model's device, the model's output)."""

    @abstractmethod
    def gradient(self, batch: Any, scale: float, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Vote:
        """Gradient of ``scale * loss_sum`` over ``batch`` (None: no rows), passed to ``offer`` bucket by bucket."""

    @abstractmethod
    def collect_gradients(self, vote: Vote, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Vote:
        """As `gradient`, from the ``.grad`` of the caller's own backward passes; its sums are in ``vote``."""

    @abstractmethod
    def apply(self, update: Update) -> bool:
        """Applies an update; the only writer of weights during training. False, without any change, if ``rule.check``
        found the gradient not finite. Every process of the node calls it; one of them has the node's targets. With
        pending gradients it returns True; they are applied while the next step's forward pass runs.
        """

    def wait_pending(self) -> None:
        """Waits for pending gradients, and applies them. Raises NotFinite, LinkError."""

    def diagnose(self, batch: Any, backward: bool = False) -> str:
        """Where in forward over ``batch``, or in backward, values first become non-finite; empty if nowhere."""
        return ""

    @abstractmethod
    def snapshot(self) -> Any:
        """The state that ``gradient`` may change: buffers and random state. Weights change only in `apply`."""

    @abstractmethod
    def rollback(self, snapshot: Any) -> None: ...

    def close(self) -> None:
        pass


class Codec(ABC):
    """Gradient compression: the collectives that add up one bucket over all nodes, and what they carry.

    A codec encodes the sum of a node. Its state ("memory") belongs to a node and a bucket; it is passed in and
    returned, and the returned one counts only if the step is applied.

    ``kinds``: of buckets that it encodes (`Bucket.kind`). ``needs_feedback``: biased unless wrapped by ``feedback``.
    """

    fidelity = "exact"
    kinds: tuple[str, ...] = (DENSE,)
    needs_feedback = False
    scaled = False  # scaling the input by a power of two scales the result exactly
    has_residual = False  # its state contains values that were not sent
    wire = "the gradient's own type"
    bucket_bytes: float = 0  # of a bucket that is worth its collectives, where they are small; 0: as without a codec

    def init(self, bucket: Bucket, seed: int) -> Any:
        """The state before the first step, the same on every node."""
        return None

    @abstractmethod
    def rounds(self, bucket: Bucket, size: int, dtype: torch.dtype) -> Sequence[Round]:
        """The collectives of `run` among ``size`` nodes, on values of this type: their order and cost are known
        before."""

    @abstractmethod
    def run(self, bucket: Bucket, values: Tensor, state: Any, context: StepContext) -> CodecRun:
        """Yields each of `rounds` with its payload, and is sent its result. State is not changed, values where a sum or
        the residual takes their memory; the same arguments give the same payloads."""

    def keep_unapplied(self, before: Any, after: Any, unused: Sequence[slice]) -> Any:
        """The next state, where these values of the global gradient were not applied."""
        return after

    def redistribute(self, states: Sequence[Any], rank: int, size: int) -> Any:
        """This node's state of a bucket, from those of ``len(states)`` nodes. With equally many nodes it is its own;
        otherwise no residual may be lost or duplicated."""
        return states[rank % len(states)]

    def on_view_change(self, bucket: Bucket, state: Any, seed: int) -> Any:
        """This node's state once other nodes have joined or failed: what all nodes must share begins anew, as in
        `init`, since a joining node has none."""
        return state


class ExchangeTraits:
    """Traits of an exchange. ``consensus``: when replicas are equal: after each step, each period, or eventually."""

    fidelity = "exact"
    consensus = "step"
    uses_codec = True
    divides_optimizer: bool = False  # each node updates a part of the weights, and `average` collects them
    factors: bool = False  # gradients of fully-connected layers may be sent as factors
    fixed_order: bool = False  # sums are bit-equal for any assignment of shares to nodes
    factor_codec: Codec | None = None  # of factors that are sent; None: the exact one
    overlap = "backward"  # "forward": a step ends with the vote, and its gradients arrive during the next
    overlaps: tuple[str, ...] = ("backward",)
    # how a node adds a product to a gradient, (into, left, right), and the number of processes that compute it
    multiply: Callable[[Tensor, Tensor, Tensor], Any] = staticmethod(Tensor.addmm_)
    num_multipliers: int = 1
    link: Link


class Exchange(ExchangeTraits, ABC):
    """Gradient synchronisation: how nodes communicate the gradients of one step."""

    @abstractmethod
    def open(self, engine: Engine, link: Link, codec: Codec, rows: int = 1, seed: int = 0) -> None:
        """``engine``: it is open, and its weights, not to be changed, have their initial values at the first `begin`.
        ``rows``: the largest number that a rank computes per step, as expected before the first one."""

    @abstractmethod
    def forms(self) -> Sequence[str]:
        """DENSE or FACTORS per bucket, equal on all ranks; all ranks change it at the same step."""

    def explain(self) -> Sequence[str]:
        """A line for each fully-connected layer: its gradient encoding, and why. Changes only with `forms`."""
        return ()

    def begin(self) -> None:
        """Called before each gradient is computed."""

    @abstractmethod
    def put(self, gradient: Gradient) -> None:
        """Accepts gradients in any order; they are sent in the order of their buckets."""

    @abstractmethod
    def collect(self, vote: Vote) -> Vote:
        """Waits until every gradient of the step has arrived. Returns this node's vote."""

    @abstractmethod
    def finish(self, tally: Tally) -> StepOutcome:
        """The outcome of the step, from the tally of votes. Only this method changes a codec's memory."""

    def average(self, weights: Sequence[Tensor], now: bool, state: bool = False) -> Sequence[Target] | None:
        """The averaged weights, for schemes such as local SGD; None where no average is due.

        Called after each update. ``now``: average at once, before saving, evaluating, or the end of training.
        ``state``: an optimizer that is divided holds the whole state on every rank after `averaged`.
        After a change of members it may be called again before `averaged`.
        """
        return None

    def averaged(self) -> None:
        """All ranks have the result of `average`, which is about to be applied."""

    def on_assignment(self, largest: float) -> None:
        """``largest``: the largest node's part of all rows from the next step on. Every process calls it."""

    def traffic(self, dtype: torch.dtype) -> ExchangeTraffic:
        """What it sends for gradients, or weights, of this type: for the planner's predictions."""
        return ExchangeTraffic(factors=self.factors)

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass

    @abstractmethod
    def rebuild(self, link: Link) -> None:
        """Uses another link from now on, of the next generation, with other ranks. This rank's memory is kept."""

    def close(self) -> None:
        pass


def __getattr__(name: str) -> Any:
    return getattr(errors, name)  # error types were formerly in this module
