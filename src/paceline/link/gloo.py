"""Gloo through torch.distributed: TCP between machines, on the interface that leads to the peers.

*Cost* (N ranks, n bytes): sum and max are rings: 2 (N - 1) steps, 2 (N - 1) / N n bytes per rank;
all-gather: N - 1 steps, (N - 1) n bytes, in chunks of rows; where ranks have different numbers of rows, the sizes
first, and the rows beyond the smallest number by broadcasts; reduce-scatter: every slice to the rank that adds it up,
(N - 1) / N n bytes.
Owns its process groups; it does not touch a default group that the user has made.
"""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from paceline import transport
from paceline.errors import LinkError
from paceline.link.net.auth import secret_of_environment
from paceline.link.net.keepalive import SILENT_S, shut_after, watched
from paceline.link.net.rendezvous import introduce, join
from paceline.link.net.route import REACH_S, Member
from paceline.link.net.store_client import StoreClient
from paceline.link.net.works import QUIET_S, TIMEOUT_S, All, Done, Patient, Promise, first_line, loss, outlive
from paceline.messages import CommCost
from paceline.transport import Detect, FailureDetector, Waits

dist: Any = torch.distributed  # its stubs leave out what we use

LARGE_BYTES = 1 << 16  # of a gather: from here its copies cost more than another message
CHUNK_BYTES = (
    1 << 19
)  # of a message: larger ones, sent in both directions at once, take 1.5 times as long at 100 Mbit/s
POLL_S = 0.5
RECONNECT_S = 2.5  # in which ranks must reach each other after a failure: TCP retransmits a lost SYN after 1 s
LEFT_S = 30.0  # in which all that a peer sent before it left has arrived


class Link(transport.Link):
    """One node's end. Every rank names the same ``host``:``port``, which rank 0 serves (or torchrun's agent does).

    ``detect``: makes the failure detector; without one an operation ends only at its own deadline. ``members``: the
    address of each rank; ``store``: this generation's keys and values.
    """

    carrier, hides = "gloo", False

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        port: int,
        generation: int = 0,
        detect: Detect | None = None,
        activity: Waits | None = None,
    ):
        self.check()
        self.activity = activity
        self._begin(*join(rank, size, host, port, generation, secret=self.secret()), generation, detect)

    @staticmethod
    def check() -> None:
        """Raises ValueError where this process cannot have such a link."""

    @staticmethod
    def secret() -> bytes:
        """The secret with which ranks authenticate each other."""
        return secret_of_environment()

    def _begin(
        self, meeting: StoreClient, store: Any, members: Sequence[Member], generation: int, detect: Detect | None
    ) -> None:
        self.rank, self.size, self.generation, self.sent_bytes = meeting.rank, meeting.size, generation, 0
        self.meeting, self.store, self.members = meeting, store, members
        self.hosts = [member.host for member in members]
        address = members[self.rank].address
        self.detector: FailureDetector | None = None
        if self.size > 1 and detect:
            self.detector = detect(self.rank, self.size, store, address, meeting.secret, meeting.alert)
        self.meeting.alert = self._look_at_others
        self._groups: list[Any] = []
        atexit.register(time.sleep, QUIET_S)
        for thing in (self.store, self.meeting):
            outlive(thing)
        self._introduce()
        self._group = self._make_group("control")
        self.meeting.patience_s = TIMEOUT_S  # from here on the detector reports failed ranks

    def _introduce(self) -> None:
        """Publishes what the others need before they connect."""

    @classmethod
    def of(cls, meeting: StoreClient, generation: int, detect: Detect | None, activity: Waits | None) -> Link:
        """A link of all ranks at this rendezvous. Closes ``meeting`` on a LinkError, and raises it."""
        link = object.__new__(cls)
        link.activity = activity
        try:
            store = dist.PrefixStore(f"paceline/{generation}", meeting)
            link._begin(meeting, store, introduce(meeting, store, RECONNECT_S), generation, detect)
        except LinkError:
            meeting.close()
            if detector := getattr(link, "detector", None):
                detector.abandon()
            raise
        return link

    def check_alive(self, peer: int, what: str) -> None:
        """Raises LinkError where that rank is known to have failed."""
        if self.detector and peer in self.detector.dead:
            raise self.failure(what, 0.0, None)

    def _look_at_others(self) -> None:
        if self.detector and (self.detector.dead or self.detector.left):
            raise self.failure("opening a lane", 0.0, None)

    def _make_group(self, name: str) -> Any:
        store = dist.PrefixStore(name, self.store)
        store.set(f"here/{self.rank}", "")
        store.multi_get([f"here/{rank}" for rank in range(self.size)])
        try:
            with watched():
                # all ranks connect at this moment; gloo's own attempts would last five times its timeout
                group = Promise(lambda: self._connect(store)).wait(REACH_S)
        except RuntimeError as error:
            raise LinkError(self._unmet(name, f"{self.carrier} did not connect them ({first_line(error)})")) from error
        self._groups.append(group)
        self._try_out(group, name)
        return group

    def _connect(self, store: Any) -> Any:
        """On a device of its own, whose port is shut once all are connected."""
        address = self.members[self.rank].address
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._threads = 2
        with shut_after(address, lambda: dist.ProcessGroupGloo.create_device(hostname=address)) as device:
            outlive(device)
            options._devices = [device]
            return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def _try_out(self, group: Any, name: str) -> None:
        """One small sum, which tests the connections."""
        own = torch.tensor([self.rank + 1])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        why = "it came out wrong"
        try:
            group.allreduce([own], options).wait(timedelta(seconds=REACH_S))
        except RuntimeError as error:
            why = first_line(error)
        if int(own) != self.size * (self.size + 1) // 2:
            raise LinkError(self._unmet(name, f"a first sum did not arrive ({why})"))

    def _unmet(self, name: str, what: str) -> str:
        own, *others = sorted(self.members, key=lambda member: member.rank != self.rank)
        return (
            f"{own} met {', '.join(map(str, others))}, but on lane {name!r} {what} within {REACH_S:.0f} s; check "
            f"the firewall and the network between these addresses"
        )

    def lane(self, name: str) -> Link:
        lane = object.__new__(type(self))
        lane.__dict__.update(self.__dict__, sent_bytes=0)
        lane._group = self._make_group(name)
        return lane

    def _handle(self, work: Any, kind: str, num_bytes: int, what: str, result: Callable[[], Any]) -> _Handle:
        self.sent_bytes += int(self.cost(kind, num_bytes).bytes)
        return _Handle(self, work, what, result)

    def sum(self, tensor: Tensor, what: str = "sum") -> transport.Handle:
        return self._reduce("sum", tensor, dist.ReduceOp.SUM, what)

    def max(self, tensor: Tensor, what: str = "max") -> transport.Handle:
        return self._reduce("max", tensor, dist.ReduceOp.MAX, what)

    def _reduce(self, kind: str, tensor: Tensor, operation: Any, what: str) -> transport.Handle:
        if not tensor.numel():
            return Done(tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        work = self._start(lambda: self._group.allreduce([tensor], options), what)
        return self._handle(work, kind, tensor.nbytes, what, lambda: tensor)

    def _start(self, operation: Callable[[], Any], what: str) -> Any:
        try:
            return operation()
        except RuntimeError as error:
            raise self.failure(what, 0.0, error) from error

    def all_gather(self, tensor: Tensor, what: str = "all-gather", even: bool = False) -> transport.Handle:
        tensor = tensor.contiguous()
        rows = [len(tensor)] * self.size
        if not even:
            own = torch.tensor([len(tensor)], dtype=torch.int64)
            rows = [int(r) for r in self.all_gather(own, f"sizes of {what}", even=True).wait()]
        row_bytes = tensor.itemsize * math.prod(tensor.shape[1:])
        # views of one tensor, so that concatenating them needs no copy
        parts = list(torch.split(tensor.new_empty((sum(rows), *tensor.shape[1:])), rows))
        if self.high_bandwidth and self.size == 2 and sum(rows) * row_bytes >= LARGE_BYTES:
            # gloo's gather copies all data twice, a broadcast receives into its place
            parts[self.rank].copy_(tensor)
            sends = [(part, rank) for rank, part in enumerate(parts) if part.numel()]
            works = [self._start(partial(self._broadcast, part, rank), what) for part, rank in sends]
            return self._handle(All(works), "all-gather", tensor.nbytes, what, lambda: parts)
        works = [
            self._start(partial(self._group.allgather, [[part[i:j] for part in parts]], [tensor[i:j]]), what)
            for i, j in self._chunks(min(rows), row_bytes)
        ]
        # the rows beyond the smallest number by one broadcast per rank: no padding is sent
        parts[self.rank][min(rows) :] = tensor[min(rows) :]
        excess = [(part[min(rows) :], rank) for rank, part in enumerate(parts)]
        works += [self._start(partial(self._broadcast, part, rank), what) for part, rank in excess if part.numel()]
        if not works:
            return Done(parts)
        return self._handle(All(works), "all-gather", tensor.nbytes, what, lambda: parts)

    def reduce_scatter(self, tensor: Tensor, what: str = "reduce-scatter") -> transport.Handle:
        slices = tensor.reshape(self.size, -1)
        own = tensor.new_empty((len(tensor) // self.size, *tensor.shape[1:]))
        wide = torch.float32 if tensor.is_floating_point() and tensor.itemsize < 4 else tensor.dtype
        spans = list(self._chunks(slices.shape[1], self.size * tensor.itemsize))
        sent = [slices[:, i:j].contiguous() for i, j in spans]
        received = [torch.empty_like(each) for each in sent]

        def added() -> Tensor:
            for (i, j), each in zip(spans, received, strict=True):
                own.view(-1)[i:j] = each.sum(0, dtype=wide)
            return own

        if not tensor.numel():
            return Done(own)
        works = [self._trade(into, each, [], [], what) for into, each in zip(received, sent, strict=True)]
        return self._handle(All(works), "reduce-scatter", tensor.nbytes, what, added)

    def shift(self, tensor: Tensor, what: str = "shift") -> transport.Handle:
        received, tensor = torch.empty_like(tensor, memory_format=torch.contiguous_format), tensor.contiguous()
        if not tensor.nbytes:
            return Done(received)
        works = []
        for i, j in self._chunks(tensor.numel(), tensor.itemsize):
            into, out = ([0] * self.size for _ in range(2))
            into[(self.rank - 1) % self.size] = out[(self.rank + 1) % self.size] = (j - i) * tensor.itemsize
            works.append(self._trade(received.view(-1)[i:j], tensor.view(-1)[i:j], into, out, what))
        return self._handle(All(works), "shift", tensor.nbytes, what, lambda: received)

    def _chunks(self, rows: int, row_bytes: int) -> list[tuple[int, int]]:
        return _chunks(rows, row_bytes, sys.maxsize if self.high_bandwidth else CHUNK_BYTES)

    def _trade(self, received: Tensor, sent: Tensor, into: Sequence[int], out: Sequence[int], what: str) -> Any:
        """Bytes from each rank to each: as many as ``out`` says to each, ``into`` from each; without these, as many to
        each as to any other. Values are not added, so that every type of value may be sent."""
        given = *(each.view(-1).view(torch.uint8) for each in (received, sent)), into, out, dist.AllToAllOptions()
        return self._start(lambda: self._group.alltoall_base(*given), what)

    def broadcast(self, tensor: Tensor, root: int = 0, what: str = "broadcast") -> transport.Handle:
        work = self._start(partial(self._broadcast, tensor, root), what)
        return self._handle(work, "broadcast", tensor.nbytes, what, lambda: tensor)

    def _broadcast(self, tensor: Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._group.broadcast([tensor], options)

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> transport.Handle:
        what = f"send to rank {peer}"
        work = self._start(lambda: Patient(self._group.send([tensor], peer, tag)), what)
        return self._handle(work, "send", tensor.nbytes, what, lambda: tensor)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> transport.Handle:
        what = f"receive from rank {peer}"
        work = self._start(lambda: Patient(self._group.recv([tensor], peer, tag)), what)
        return self._handle(work, "recv", tensor.nbytes, what, lambda: tensor)

    def cost(self, operation: str, num_bytes: int) -> CommCost:
        others = self.size - 1
        if operation in ("sum", "max"):
            return CommCost(2 * others, 2 * others / self.size * num_bytes)
        if operation == "reduce-scatter":
            return CommCost(others, others / self.size * num_bytes)
        if operation == "all-gather":
            return CommCost(others, others * num_bytes)
        if operation == "broadcast":
            rounds = math.ceil(math.log2(self.size))
            return CommCost(rounds, rounds * num_bytes)
        return CommCost(1, 0 if operation == "recv" else num_bytes)

    def failure(self, what: str, waited_s: float, error: Exception | None) -> LinkError:
        """The error for a failed operation: which peer, on which host, after how long a wait."""
        cut = self._cut_off(error)
        peer = self.detector.verdict(2.5 if error and cut is None else 0.0) if self.detector else None
        if peer is None and cut is not None:
            text = f"lost {cut} during {what} (waited {waited_s:.1f} s): no answer from there for {SILENT_S} s"
            return LinkError(f"{text}, though rank 0 may hear it; look at the network between the two", cut.rank)
        return loss(self, peer, what, waited_s, error)

    def _cut_off(self, error: Exception | None) -> Member | None:
        """The member that gloo could not reach any more, by its message: [address]:port and "timed out"."""
        text = str(error) if "timed out" in str(error) else ""
        named = (each for each in self.members if f"[{each.address}]" in text or f" {each.address}:" in text)
        return next(named, None)

    def close(self) -> None:
        if self.detector and not self.detector.dead:
            self.detector.close()
        time.sleep(QUIET_S)


class _Handle(transport.Handle):
    def __init__(self, link: Link, work: Any, what: str, result: Callable[[], Any]):
        self.link, self.work, self.what, self.result = link, work, what, result

    def done(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, deadline_s: float | None = None) -> Any:
        with self.link.waiting(self.what):
            return self._wait(TIMEOUT_S if deadline_s is None else deadline_s)

    def _wait(self, patience_s: float) -> Any:
        start = time.monotonic()
        while True:
            try:
                self.work.wait(timedelta(seconds=min(POLL_S, patience_s)))
                return self.result()
            except RuntimeError:
                waited_s = time.monotonic() - start
                if self.done():
                    return self._settled(waited_s)
                detector = self.link.detector
                if detector and (detector.dead or (detector.left and waited_s > LEFT_S)):
                    raise self.link.failure(self.what, waited_s, None) from None
                if waited_s >= patience_s:
                    raise LinkError(f"gave up on {self.what} after {waited_s:.0f} s; every peer is alive") from None

    def _settled(self, waited_s: float) -> Any:
        """A wait may time out at the moment at which the operation completes: a second wait gives its result."""
        try:
            self.work.wait(timedelta(seconds=POLL_S))
        except RuntimeError as error:
            raise self.link.failure(self.what, waited_s, error) from None
        return self.result()


def _chunks(num_rows: int, row_bytes: int, max_bytes: int) -> list[tuple[int, int]]:
    """(start, stop) of rows that are sent at once."""
    step = max(1, max_bytes // max(1, row_bytes))
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows if row_bytes else 0, step)]
