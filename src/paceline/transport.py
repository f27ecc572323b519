"""How nodes communicate: membership, collectives, the commit protocol, and failure detection."""

from __future__ import annotations

import json
import queue
import struct
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor, empty_like

from paceline.errors import LinkError
from paceline.messages import CommCost, StepOutcome, Tally, Target, Vote


class Handle:
    """An asynchronous operation. ``wait`` returns its result or raises LinkError at the deadline."""

    def wait(self, deadline_s: float | None = None) -> Any:
        raise NotImplementedError

    def done(self) -> bool:
        raise NotImplementedError


class Both(Handle):
    """Two operations, with the result of the first."""

    def __init__(self, first: Handle, second: Handle):
        self._first, self._second = first, second

    def done(self) -> bool:
        return self._first.done() and self._second.done()

    def wait(self, deadline_s: float | None = None) -> Any:
        result = self._first.wait(deadline_s)
        self._second.wait(deadline_s)
        return result


class Threads:
    """The thread classes and the clock that an exchange uses: Python's, or those of a simulation."""

    Thread: Any = threading.Thread
    Condition: Any = threading.Condition
    Queue: Any = queue.Queue

    def now(self) -> float:
        """*Units*: seconds since an arbitrary time."""
        return time.perf_counter()


class Channel(Protocol):
    """A channel for large data to one joining node."""

    def send(self, parts: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Raises LinkError where the node has failed."""

    def set_deadline_mode(self) -> None:
        """All other nodes wait from now on: a slow transfer is declared failed, even if it makes progress."""

    def close(self) -> None: ...


class JoinDesk:
    """Replies for the members to joining nodes that have authenticated.

    ``glance`` is called while this process is disconnected from the other members and waits for them. It may raise.
    """

    glance: Callable[[], None] = staticmethod(lambda: None)

    def waiting(self) -> dict[str, dict[str, Any]]:
        """The request of each joining node, by its name."""
        raise NotImplementedError

    def answer(self, name: str, response: dict[str, Any]) -> None:
        raise NotImplementedError

    def channel(self, name: str) -> Channel:
        """The node's newest connection. Raises LinkError where there is none."""
        raise NotImplementedError


def boottime_s() -> float:
    """A monotonic clock that includes the time of a suspended machine, where the system has one. *Units*: seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class FailureDetector(Protocol):
    """Which ranks of a link have failed, and what each is doing. ``dead``: how each failed; ``left``: the ranks that
    ended normally."""

    dead: dict[int, str]
    left: set[int]

    def verdict(self, grace_s: float) -> int | None:
        """The first rank known to have failed; waits up to ``grace_s`` for a failure to be detected."""

    def still_member(self, since: float) -> bool:
        """False if this process was suspended since ``since`` (`boottime_s`) and the others declared it failed."""

    def peer_status(self) -> dict[int, dict[str, Any]]:
        """The last status of each rank."""

    def peer_stack(self, rank: int) -> str:
        """The stack of the training thread of ``rank``; empty where it is not available."""

    def abandon(self) -> None:
        """Ends without a message, so that ranks which are still in an operation of this link detect a failure."""

    def close(self) -> None:
        """Ends normally: tells the other ranks that this one has not failed."""


class Board(Protocol):
    """The key-value store of the rendezvous, before the ranks are connected."""

    def set(self, key: str, word: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


# rank, size, board, this rank's address, the run's secret; a function that is called during waits, and may raise
Detect = Callable[[int, int, Board, str, bytes, Callable[[], None]], FailureDetector]


class Waits(Protocol):
    """Receives what this process is doing, and its waits (`report.activity.Activity`)."""

    host: str
    step: int
    notice: Callable[[str], None]
    siblings: Callable[[], str]

    @property
    def limit_s(self) -> float: ...

    def waiting(self, what: str) -> AbstractContextManager[None]: ...

    def at(self, what: str) -> AbstractContextManager[None]: ...


class Collectives(ABC):
    """MPI's collectives and messages, on one channel, in the same order on all ranks; handles are asynchronous."""

    rank: int = 0
    size: int = 1

    @abstractmethod
    def sum(self, tensor: Tensor, what: str = "sum") -> Handle:
        """All-reduce: the sum over all ranks, in place, in the tensor's own type. Result: the tensor."""

    @abstractmethod
    def max(self, tensor: Tensor, what: str = "max") -> Handle: ...

    @abstractmethod
    def all_gather(self, tensor: Tensor, what: str = "all-gather", even: bool = False) -> Handle:
        """Result: every rank's tensor, in rank order. First dimensions may differ unless ``even``."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, what: str = "reduce-scatter") -> Handle:
        """Result: this rank's slice of the sum. *Shapes*: (size * n, ...) in, (n, ...) out."""

    def shift(self, tensor: Tensor, what: str = "shift") -> Handle:
        """Result: the tensor of the rank before, in a tensor of its own; this one's goes to the next rank. Of two ranks
        or more."""
        received = empty_like(tensor)
        return Both(self.recv(received, (self.rank - 1) % self.size), self.send(tensor, (self.rank + 1) % self.size))

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0, what: str = "broadcast") -> Handle: ...

    @abstractmethod
    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Handle: ...

    @abstractmethod
    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> Handle: ...


class LinkTraits:
    """Traits of a link; `registry.says` reads them from the source, without an import."""

    networked: bool = True  # between nodes
    hides: bool = False  # all traffic is encrypted
    admits: bool = True  # a node may join a running training
    by_all: bool = False  # a joining node must also select it
    finds_others: bool = False  # needs no host for the rendezvous
    started_by: tuple[str, str] = ("", "")  # default if these variables are the node's rank and the number of nodes
    on_cpu: bool = False  # cannot send from a GPU's memory
    package: tuple[str, str] = ("", "")  # a package that it needs, and the extra that installs it
    accumulates_fp32: bool = False  # 16-bit floats are added in 32 bits


class Link(LinkTraits, Collectives):
    """The transport among a fixed group of ranks, which `Membership` determines."""

    generation: int = 0
    hosts: Sequence[str] = ("",)
    sent_bytes: int = 0
    threads: Threads = Threads()
    high_bandwidth: bool = False  # a byte costs more CPU time than transmission time
    activity: Waits | None = None  # notes every wait
    detector: FailureDetector | None = None

    @abstractmethod
    def lane(self, name: str) -> Link:
        """Another channel of the same ranks, with its own order of operations."""

    def set_regime(self, quick: bool) -> None:
        """Selects the all-gather algorithm for a fast or a slow network. All ranks must pass the same value."""
        self.high_bandwidth = quick

    @abstractmethod
    def cost(self, operation: str, num_bytes: int) -> CommCost:
        """Sequential messages, and bytes sent per rank, of one collective on ``num_bytes``."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """A context in which this process waits for others."""
        return self.activity.waiting(what) if self.activity else nullcontext()

    def abandon(self) -> None:
        """Ends without a message, so that ranks which are still in an operation of this link detect a failure."""
        if self.detector:
            self.detector.abandon()

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class View:
    """The new members. ``previous``: the old rank of each, without the joined members, whose ranks are last."""

    link: Link
    previous: tuple[int, ...]
    joined: tuple[Joiner, ...] = ()


class Membership:
    """The members of a training, and the link between them, which is rebuilt when they change. ``expects_joiners``:
    nodes may join later, even if there is one rank now."""

    link: Link
    expects_joiners: bool = False

    def stand_by(self, least: int = 1) -> None:
        """Enables `reconfigure` after failures, for ``least`` ranks or more. Every rank calls it. Raises ValueError
        where the link cannot be rebuilt."""
        raise ValueError("this link does not survive the failure of a node; set PACELINE_LINK to another")

    def reconfigure(self, admits: Sequence[Joiner] = ()) -> View:
        """The survivors, in the old order, over a link of the next generation. All waits on the old link fail.

        ``admits``, given by rank 0: the joining nodes; none joins if a member fails at the same time. Raises LinkError
        where this rank may not continue, or no rank may.
        """
        raise LinkError("this link does not survive the failure of a node")

    def assert_still_member(self, since: float) -> None:
        """Called at the end of an operation, with the end of the previous one (`boottime_s`). Raises LinkError where
        this process was suspended since then and the others continued without it: they may lack its result."""

    def peer_status(self) -> dict[int, dict[str, Any]]:
        """The last status of each rank; empty where ranks do not send their status."""
        return {}

    def peer_stack(self, rank: int) -> str:
        """The stack of the training thread of ``rank``; empty where it is not available."""
        return ""

    @property
    def join_desk(self) -> JoinDesk | None:
        """The desk that replies to joining nodes; None where none can join. Rank 0's decides."""
        return None


class Control:
    """Control messages of all processes, in one order: votes, sums, texts, rank 0's tensors. ``rank``, ``size``: of
    nodes. ``num_view_changes``: failures so far after which an operation was repeated."""

    rank: int
    size: int
    generation: int
    tolerates_loss: bool = False  # training survives a failed node: the survivors may compute a step again
    num_view_changes: int = 0
    on_view_change: Callable[[ViewChange], None] | None = None  # called after each failure, before the repetition

    def commit(self, vote: Vote, finish: Callable[[Tally], StepOutcome]) -> StepOutcome:
        """The vote on a step, once all its gradients have arrived. ``finish`` is called if the vote completed on any
        rank. RETRY if it completed on none."""
        raise NotImplementedError

    def recover(self, error: LinkError) -> StepOutcome:
        """Called instead of `commit` if the link failed before it. Returns RETRY, or raises ``error``."""
        raise error

    def transact(self, compute: Callable[[], Sequence[Target] | None]) -> Sequence[Target] | None:
        """The result of the collective ``compute``, once all ranks have it; repeated if one fails. None where the
        result is None; empty for a process that does not hold the link."""
        return compute()

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sums of a few numbers over all processes, for evaluation and reports."""
        raise NotImplementedError

    def all_gather(self, *messages: bytes) -> list[bytes]:
        """Every process's message, in the order of nodes and their processes. Between nodes it receives those of all
        processes of a node; nodes may have different numbers of processes."""
        raise NotImplementedError

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copies rank 0's tensors into those of all ranks."""
        raise NotImplementedError

    def node_broadcast(self, message: bytes | bytearray) -> bytes | bytearray:
        """The message of the process that holds the link, to all processes of this node."""
        return message

    def node_gather(self, message: bytes) -> list[bytes]:
        """The message of every process of this node, in their order."""
        return [message]

    def admit(self, joiners: Sequence[Joiner] = ()) -> None:
        """Admits the joining nodes that rank 0 names, between two steps. Every process of every member must call it."""
        raise NotImplementedError

    def enter(self) -> None:
        """Called on a joining node: from now on it is a member. Every process of the node must call it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Joiner:
    """A joining node: its host, its number of processes, and the fewest and most rows of a global batch for it.
    ``turn``: the number of its request."""

    name: str
    host: str
    size: int = 1
    least: int = 1
    most: int = 1
    turn: int = 0


@dataclass(frozen=True)
class ViewChange:
    """A change of members. ``previous_ranks``, ``rows``: the former rank and rows of each remaining node. ``joined``:
    the new nodes, whose ranks are last."""

    generation: int
    previous_ranks: tuple[int, ...]
    rows: tuple[int, ...]
    lost: tuple[str, ...]  # by host
    seconds: float  # from the failed operation, or the end of a step, to the new link
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


def checksum(names: Sequence[str]) -> float:
    """Of names that must be equal in all processes."""
    return float(zlib.crc32("\n".join(names).encode()))


def pack_frames(parts: Sequence[bytes]) -> bytes:
    """Packs several messages into one, each with its length."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def unpack_frames(data: bytes) -> list[bytes]:
    parts = []
    while data:
        (length,) = struct.unpack_from("<I", data)
        parts.append(data[4 : 4 + length])
        data = data[4 + length :]
    return parts
