"""How nodes communicate: membership, collectives, the commit protocol, and failure detection."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from paceline.errors import LinkError
from paceline.messages import CommCost, StepOutcome, Tally, Target, Vote


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


class Channel(Protocol):
    """For large data, to one joining node."""

    def send(self, parts: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Raises LinkError where the node has failed."""

    def set_deadline_mode(self) -> None:
        """From now on all other nodes wait for it: a slow transfer is declared failed, even while bytes leave."""

    def close(self) -> None: ...


class JoinDesk:
    """Answers, for the members, joining nodes that have authenticated.

    ``glance`` is called while this process, cut off from the other members, waits for them: it may raise.
    """

    glance: Callable[[], None] = staticmethod(lambda: None)

    def waiting(self) -> dict[str, dict[str, Any]]:
        """What each of them requests, by its name."""
        raise NotImplementedError

    def answer(self, name: str, response: dict[str, Any]) -> None:
        raise NotImplementedError

    def line(self, name: str) -> Channel:
        """Its newest connection. Raises LinkError where there is none."""
        raise NotImplementedError


def boottime_s() -> float:
    """Seconds, also those in which the machine was suspended, where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class FailureDetector(Protocol):
    """Which ranks of a link have failed, and what each is doing. ``dead``: how each failed; ``left``: those that ended
    as they should."""

    dead: dict[int, str]
    left: set[int]

    def verdict(self, grace_s: float) -> int | None:
        """The first rank known to be dead, waiting up to ``grace_s`` to learn of one."""

    def still_member(self, since: float) -> bool:
        """Whether the others have not declared this process failed, if it stood still ``since`` then (`boottime_s`)."""

    def peer_status(self) -> dict[int, dict[str, Any]]:
        """What each rank reported last."""

    def peer_stack(self, rank: int) -> str:
        """Where the thread that trains on ``rank`` stands in its code; empty where that is not to be had."""

    def abandon(self) -> None:
        """Ends without a message, so that each rank still in an operation of this link learns that it has failed."""

    def close(self) -> None:
        """Leaves as one that has ended as it should."""


class Board(Protocol):
    """A key-value store of the ranks, before they are connected."""

    def set(self, key: str, word: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


# rank, size, board, this rank's address, the run's secret; what is called while it waits, and may raise
Detect = Callable[[int, int, Board, str, bytes, Callable[[], None]], FailureDetector]


class Waits(Protocol):
    """Where this process notes what it is doing, and which rank it waits for (`report.activity.Activity`)."""

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


class LinkTraits:
    """What a link is like; read by `registry.says`, before anything is imported."""

    networked: bool = True  # between nodes
    hides: bool = False  # everything is encrypted
    admits: bool = True  # a node may join a running training
    by_all: bool = False  # a joining node must have named it as well
    finds_others: bool = False  # without a host for the rendezvous
    started_by: tuple[str, str] = ("", "")  # the default where these variables are a node's rank and their number
    on_cpu: bool = False  # carries nothing from a GPU's memory
    package: tuple[str, str] = ("", "")  # that it needs, and the extra that brings it
    accumulates_fp32: bool = False  # 16-bit floats are added in 32 bits


class Link(LinkTraits, Collectives):
    """How bytes move among a fixed group of ranks, which `Membership` chooses."""

    generation: int = 0
    hosts: Sequence[str] = ("",)
    sent_bytes: int = 0
    threads: Threads = Threads()
    high_bandwidth: bool = False  # a byte costs more on processors than on the wire
    activity: Waits | None = None  # notes every wait
    detector: FailureDetector | None = None

    def lane(self, name: str) -> Link:
        """The same ranks with an order of their own."""
        raise NotImplementedError

    def set_regime(self, high_bandwidth: bool) -> None:
        """Gathers from now on are tuned for a high or a low bandwidth. All ranks must pass the same value."""
        self.high_bandwidth = high_bandwidth

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
    """The members from now on. ``previous``: the old rank of each, without the new members, whose ranks are last."""

    link: Link
    previous: tuple[int, ...]
    joined: tuple[Joiner, ...] = ()


class Membership:
    """The members of a training, and the link between them, which is rebuilt when they change. ``expects_joiners``:
    others join later, though there is one rank now."""

    link: Link
    expects_joiners: bool = False

    def stand_by(self, least: int = 1) -> None:
        """From now on `reconfigure` survives failures, with ``least`` ranks or more. Every rank calls it. Raises
        ValueError where it cannot."""
        raise ValueError("this link ends with the first node that it loses; set PACELINE_LINK to another")

    def reconfigure(self, admits: Sequence[Joiner] = ()) -> View:
        """The survivors, in the old order, over a link of the next generation. All waits on the old one fail.

        ``admits``, of rank 0: the nodes that join, none where a member fails at the same time. Raises LinkError where
        this rank, or no rank, may continue.
        """
        raise LinkError("this link ends with the first node that it loses")

    def assert_still_member(self, since: float) -> None:
        """Called when an operation has ended, with when the one before did, by `boottime_s`. Raises LinkError where
        this process stood still in between, and the others continued without it: they may lack what it received."""

    def peer_status(self) -> dict[int, dict[str, Any]]:
        """What each rank reported last; empty where ranks do not report to each other."""
        return {}

    def peer_stack(self, rank: int) -> str:
        """Where the thread that trains on ``rank`` stands in its code; empty where that is not to be had."""
        return ""

    @property
    def join_desk(self) -> JoinDesk | None:
        """What answers joining nodes; None where none can join. Rank 0's decides."""
        return None


class Control:
    """Control messages of all processes, in one order: votes, sums, texts, rank 0's tensors. ``rank``, ``size``: of
    nodes. ``num_view_changes``: failures so far after which an operation was repeated."""

    rank: int
    size: int
    generation: int
    tolerates_loss: bool = False  # a failed node ends nothing: the survivors may compute a step again
    num_view_changes: int = 0
    on_view_change: Callable[[ViewChange], None] | None = None  # called at each failure, before anything is repeated

    def commit(self, vote: Vote, finish: Callable[[Tally], StepOutcome]) -> StepOutcome:
        """The vote on a step, once all its gradients are here. ``finish`` is called where it came through, even if for
        others alone. RETRY where it came through nowhere."""
        raise NotImplementedError

    def recover(self, error: LinkError) -> StepOutcome:
        """Instead of `commit`, after the link broke before it: RETRY, or raises ``error``."""
        raise error

    def transact(self, compute: Callable[[], Sequence[Target] | None]) -> Sequence[Target] | None:
        """What ``compute`` makes together with the others, once all have it; computed again where one fails. None where
        it is; empty for a process that does not hold the link."""
        return compute()

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sums of a few numbers over all processes, for evaluation and reports."""
        raise NotImplementedError

    def all_gather(self, *messages: bytes) -> list[bytes]:
        """Every process's message, in the order of nodes and their processes. Between nodes it is given those of all
        processes of a node; nodes may have unlike numbers of them."""
        raise NotImplementedError

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's tensors into those of all ranks."""
        raise NotImplementedError

    def node_broadcast(self, message: bytes | bytearray) -> bytes | bytearray:
        """The message of the process that holds the link, to all processes of this node."""
        return message

    def admit(self, joiners: Sequence[Joiner] = ()) -> None:
        """Between two steps: admits the nodes that rank 0 names. Every process of every member must call it."""
        raise NotImplementedError

    def enter(self) -> None:
        """As one of those: from here on this process is one of all. Every process of the node must call it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Joiner:
    """A joining node: its host, its processes, and the fewest and most rows of a global batch that it takes. ``turn``:
    the number of its request."""

    name: str
    host: str
    size: int = 1
    least: int = 1
    most: int = 1
    turn: int = 0


@dataclass(frozen=True)
class ViewChange:
    """Other nodes from now on. ``previous_ranks``, ``rows``: the rank that each of the old ones had before, and its
    rows. ``joined``: the new ones, whose ranks are last."""

    generation: int
    previous_ranks: tuple[int, ...]
    rows: tuple[int, ...]
    lost: tuple[str, ...]  # by host
    seconds: float  # from the broken operation, or the end of a step, to the new link
    why: str
    joined: tuple[Joiner, ...] = ()

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> ViewChange:
        fields: dict[str, Any] = json.loads(data)
        fields["joined"] = [Joiner(**each) for each in fields["joined"]]
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**fields)
