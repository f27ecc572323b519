"""Every promise between rooms. What they hand each other is in `messages`, how nodes are joined in `transport`.

A step reads: an Engine turns this node's share of the batch into Gradients, an Exchange agrees on them
over a Link (each encoded by a Codec), and the Decision says whether the step happened.

The network only ever adds: losses, weights, gradients. Backward runs on the loss *sum* times a
constant known before the step (1 / expected weight); what was agreed is corrected once, afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import errors
from paceline.messages import Bucket, CommCost, Gradient, RowRange, StepOutcome, Tally, Target, Update, Vote
from paceline.transport import Control, Link, Waits

Loss = Callable[..., Any]  # of the model's output and a batch; a metric likewise


class Share(Protocol):
    """A process's place among all, with the rows of a batch that it is dealt (`data.sampler`)."""

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
    """What all processes compute in one step. ``weight``: its number of rows, known before anybody computes.

    ``epoch``, ``step``, ``num_steps``: its place in the data, and the steps of its epoch, where they are known.
    ``wait_s``: seconds for which its rows were waited for, so far. ``assigned``: whether an `Assignment` says whose its
    rows are. ``num_local_samples``: how many `share` gave here, where that is known.
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
        """The rows of this assignment, or None if it has none."""
        raise NotImplementedError


class EngineTraits:
    """What an engine is like. Plain values are read by `registry.says`, before anything is imported."""

    fidelity = "exact"
    counts: str = ""  # what the k of NAME:k counts: a "thread", a "copy" of the model, a "share" of a batch
    starts_processes: bool = False  # each copy is a process of the script, which a launcher starts
    planned: bool = False  # a plan tries its rows, and predicts them
    reproduces: bool = False  # the same bits for any number of nodes, over an exchange of a fixed order
    environment: Mapping[str, str] = {}  # of its processes, where users have not set it
    optimizer_takes_factors: bool = False  # the optimizer takes a layer's factors instead of its gradient
    num_virtual_shards: int = 0  # virtual shares that a global batch is always dealt in; 0: it is dealt row by row
    may_retry: bool = False  # a step may be computed again after its gradients have left
    defers_updates: bool = False  # may begin the next step while gradients of the last are still coming
    divided: bool = False  # a global batch is computed in several parts, here or elsewhere
    accumulate: int = 1  # micro-batches that a share is computed in
    seed: int = 0  # of what virtual shares draw


class EngineState:
    """What an engine trains, and what its optimizer keeps."""

    optimizer: Optimizer
    buckets: tuple[Bucket, ...] = ()
    weights: Sequence[Tensor] = ()  # every trainable parameter, in the order of `names`
    names: tuple[str, ...] = ()
    # each parameter's in the optimizer's state_dict; none where it holds other things
    optimizer_index: Mapping[str, int] = {}
    still: Mapping[str, tuple[int, int]] = {}  # marks of the parameters that do not train, as they were when all joined
    hint: str = ""  # what the last gradient has shown that users should know

    @property
    def buffers(self) -> Sequence[Tensor]:
        """The model's dense buffers as they are now: forward may have put other tensors in their place."""
        raise NotImplementedError

    def options(self) -> list[dict[str, Any]]:
        """The numbers of each group of the optimizer, as JSON has them."""
        return []

    def compare_options(self, reported: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
        """How these differ, each with the process it is of; empty where they differ by rounding alone."""
        return ""

    def state(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's whole ``state_dict``. Every process of the node must call it."""
        raise NotImplementedError

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Takes a whole ``state_dict``, the same on every process of the node."""
        raise NotImplementedError

    def optimizer_rows(self, windows: Mapping[str, RowRange]) -> dict[str, dict[str, Any]]:
        """The optimizer's state of these rows of these parameters, by their names in `optimizer_index`. Every process
        of the node must call it."""
        raise NotImplementedError

    def take_optimizer_rows(self, states: Mapping[str, Mapping[str, Any]], windows: Mapping[str, RowRange]) -> None:
        """What `optimizer_rows` gave elsewhere. Every process of the node must call it."""
        raise NotImplementedError


class EngineOnNode:
    """One process of several that are an engine together: a node's, which others reach through one of them."""

    local_place: tuple[int, int] = (0, 1)  # which of how many parts of the node's share this process computes

    @property
    def pids(self) -> Sequence[int]:
        """The processes of this node, as far as this one knows them."""
        return (os.getpid(),)

    @property
    def division(self) -> str:
        """How the optimizer's work is divided on this node: "one process", "slices" or "whole tensors"."""
        return "one process"

    @property
    def waited_s(self) -> float:
        """Seconds, so far, in which `gradient` waited for other processes in the middle of its work."""
        return 0.0

    def local_exchange(
        self, exchange: Exchange, control: Control, alone: bool, activity: Waits
    ) -> tuple[Exchange, Control]:
        """Both as this process sees them: themselves, or stand-ins where another process holds the link. ``alone``:
        there is no other node, and none comes later."""
        return exchange, control

    def sync_norm(self, link: Link | None) -> None:
        """From now on batch norm in `gradient` is over the rows of all processes; ``link`` is local rank 0's, if any.
        Every process of every node must call it, after `open`."""
        raise NotImplementedError

    def reopen(self, link: Link | None) -> None:
        """What `sync_norm` was given has been rebuilt: its sums go over ``link`` from the next step on."""


class Engine(EngineTraits, EngineState, EngineOnNode):
    """How one node turns its share of a batch into a gradient, and a gradient into an update."""

    # (into, left, right): what an update does with a layer's factors, momentum left out
    multiply: Callable[[Tensor, Tensor, Tensor], Any] = staticmethod(Tensor.addmm_)
    norm: float | None = None  # of the whole gradient at the last update, where the rule asked for it
    terms: tuple[str, ...] = ()  # the names of the loss's parts, where it has any
    num_local_samples: int | None = None  # samples of the share that comes next, where they are dealt

    def open(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, metric: Loss | None = None) -> None:
        raise NotImplementedError

    @property
    def precision(self) -> str:
        """What forward and backward compute in: fp32, bf16 or fp16."""
        return "fp32"

    def begin_step(self, assignment: Share, step: int) -> None:
        """Called before each gradient: whose rows these will be, and of which step."""

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """(the batch where the model is, the model's output)."""
        raise NotImplementedError

    def gradient(self, batch: Any, scale: float, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Vote:
        """Gradient of ``scale * loss_sum`` over ``batch`` (None: no rows), offered bucket by bucket."""
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
        """Waits for gradients that are still coming, and applies them. Raises NotFinite, LinkError."""

    def diagnose(self, batch: Any, backward: bool = False) -> str:
        """Where in the forward pass over ``batch``, or backward, numbers first cease to be finite; empty if nowhere."""
        return ""

    def snapshot(self) -> Any:
        """All that ``gradient`` may change: buffers and random state. Weights change in `apply` alone."""
        raise NotImplementedError

    def rollback(self, kept: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Codec:
    """What a gradient looks like on the wire. Its memory is a value: nothing here changes itself.

    ``sums``: payloads may be added on the wire (in their own type, ``wire``); else each rank's is gathered and decoded.
    ``needs_feedback``: loses mass unless wrapped by ``feedback``. ``has_residual``: its memory is to be sent yet.
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
        """(payload, pending): ``pending`` becomes memory by `commit` if the step is applied."""
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
        """This rank's memory of a bucket, of those that ``len(memories)`` ranks had: among as many, its own. Among
        others no residual may be lost or kept twice."""
        return memories[rank % len(memories)]

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        raise NotImplementedError


class ExchangeTraits:
    """What an exchange is like. ``consensus``: replicas are equal after each step, period, or eventually."""

    fidelity = "exact"
    consensus = "step"
    uses_codec = True
    factors: bool = False  # fully-connected layers may travel as such
    fixed_order: bool = False  # sums are the same bits whoever has computed which share of a batch
    gathers: bool = False  # each rank's gradients go to all others, and each adds them up
    factor_dtype: torch.dtype | None = None  # of factors on the wire, where every node computes them in 16 bits
    overlap = "backward"  # "forward": a step ends with the vote, and its gradients arrive during the next
    overlaps: tuple[str, ...] = ("backward",)
    # how a node adds a product to a gradient, (into, left, right), and the processes that share in it
    multiply: Callable[[Tensor, Tensor, Tensor], Any] = staticmethod(Tensor.addmm_)
    num_multipliers: int = 1
    link: Link


class Exchange(ExchangeTraits):
    """How nodes agree on one step."""

    def open(
        self,
        buckets: Sequence[Bucket],
        link: Link,
        codec: Codec,
        rows: int = 1,
        seed: int = 0,
        optimizer_takes_factors: bool = False,
    ) -> None:
        """``optimizer_takes_factors``: the engine's optimizer takes factors, which pay even where nothing is sent."""
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
        """Takes a gradient, in any order; they leave in the order of their buckets."""
        raise NotImplementedError

    def collect(self, vote: Vote) -> Vote:
        """Waits until every gradient of the step is here. Returns this node's vote."""
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
        """All ranks have what `average` gave: it is about to be applied."""

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


def __getattr__(name: str) -> Any:
    return getattr(errors, name)  # where scripts have looked for them
