"""MPI through mpi4py: every network that the cluster's MPI supports, between processes that mpirun started.

*Cost* (N ranks, n bytes), bytes being the mean over the ranks, whichever tree or ring the library picks: sum and
max: 2 ceil(log2 N) steps, 2 (N - 1) / N n; all-gather: N - 1 steps, (N - 1) n; reduce-scatter, a reduction to one rank
and a scatter: 2 ceil(log2 N) steps, (N - 1) (N + 1) / N^2 n; broadcast: ceil(log2 N) steps, (N - 1) / N n.
*Types*: MPI has neither bf16 nor fp16: torch adds them in a user-defined MPI operation, which rounds every sum to the
type. Tensors in host memory only.
*Failures*: plain mpirun ends the whole job when a process dies, and names it. Under ``mpirun --with-ft ulfm`` (Open MPI
5) a heartbeat reports the failure to the survivors, and each ends by a LinkError that names the failed rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline import transport
from paceline.errors import LinkError
from paceline.link.net.auth import secret_of_environment
from paceline.link.net.keepalive import SILENT_S, addresses, unanswered
from paceline.link.net.mpi_progress import Flight, library
from paceline.link.net.route import is_loopback
from paceline.link.net.works import loss
from paceline.messages import CommCost
from paceline.registry import LINK
from paceline.transport import Detect, FailureDetector, Waits

JOIN_S = 60.0
TIMEOUT_S = 1800.0  # the heartbeat detects a failed peer long before this
POLL_S = 0.2
LEFT_S = 8.0  # in which all that a peer sent before it left has arrived
NAME_BYTES = 1024


class Link(transport.Link):
    """One node's end. mpirun must have started one process per node, rank ``rank`` of ``size``.

    ``host``: rank 0's address for the heartbeat; where it is empty or resolves to loopback, the address is taken from
    the routing table. The port is not used.
    """

    admits, finds_others, on_cpu = False, True, True
    started_by = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    package = ("mpi4py", "mpi")

    def __init__(
        self,
        rank: int,
        size: int,
        host: str = "",
        port: int = 0,
        generation: int = 0,
        detect: Detect | None = None,
        activity: Waits | None = None,
    ):
        self.rank, self.size, self.generation, self.sent_bytes = rank, size, generation, 0
        started = os.environ.get("OMPI_COMM_WORLD_SIZE", str(size))
        if started != str(size):  # before MPI begins, which waits for every process
            raise ValueError(
                f"link 'mpi' needs one process of mpirun per node, but there are {started} for {size} nodes; use "
                f"mpirun --map-by ppr:1:node, or set PACELINE_LINK={LINK}"
            )
        self._library = library()
        world = self._library.mpi.COMM_WORLD
        if (world.rank, world.size) != (rank, size):
            raise ValueError(
                f"link 'mpi' is rank {rank} of {size}, but MPI says rank {world.rank} of {world.size}; start "
                f"the script by mpirun -n {size}, and by that of the library that mpi4py loads "
                f"({self._library.mpi.Get_library_version().partition(',')[0]}), or set PACELINE_LINK={LINK}"
            )
        self.detector: FailureDetector | None = None
        self.activity = activity
        self.hosts = [f"the node of rank {r}" for r in range(size)]
        self._library.unclosed.add(self)
        self._comm = self._duplicate(world, "joining the others")
        names = self._gather_text(socket.gethostname())
        self.hosts = self._gather_text(os.environ.get("PACELINE_HOST", socket.gethostname()))
        all_addresses = [text.split() for text in self._gather_text(" ".join(addresses()))]
        self._addresses = {each for its in all_addresses for each in its}
        if size > 1 and detect:
            try:
                address = _address(host, names, all_addresses) if rank == 0 else ""
                secret = secret_of_environment()
                self.detector = detect(rank, size, _Bulletin(self), address, secret, lambda: None)
            except OSError as error:
                if isinstance(error, LinkError):
                    raise
                raise LinkError(
                    f"rank {rank} on {self.hosts[rank]} could not connect to the others for a heartbeat ({error}); set "
                    f"MASTER_ADDR to an address of rank 0 that every node reaches"
                ) from error

    def _duplicate(self, comm: Any, what: str) -> Any:
        lane, request = comm.Idup()
        _Handle(self, what, lambda: None, self._library.progress.watch(request, comm)).wait(JOIN_S)
        lane.Set_errhandler(self._library.mpi.ERRORS_RETURN)
        return lane

    def _gather_text(self, text: str) -> list[str]:
        """Every rank's text."""
        texts = self.all_gather(_encoded(text), "the names of the nodes", even=True).wait(JOIN_S)
        return [bytes(part.tolist()).decode(errors="replace").strip() for part in texts]

    def lane(self, name: str) -> Link:
        lane = object.__new__(Link)
        lane.__dict__.update(self.__dict__, sent_bytes=0)
        lane._comm = self._duplicate(self._comm, f"opening lane {name!r}")
        return lane

    def _begin(
        self, kind: str, num_bytes: int, what: str, start: Callable[[], Any], result: Callable[[], Any], *buffers: Any
    ) -> transport.Handle:
        try:
            request = start()
        except self._library.mpi.Exception as error:
            raise self.failure(what, 0.0, error) from error
        self.sent_bytes += int(self.cost(kind, num_bytes).bytes)
        return _Handle(self, what, result, self._library.progress.watch(request, buffers))

    def _memory(self, tensor: Tensor, num_values: Any = None, kind: Any = None) -> list[Any]:
        """A tensor as an MPI buffer; its values are typed by their width alone, unless ``kind`` is given."""
        if tensor.device.type != "cpu":
            raise ValueError(
                f"link 'mpi' moves tensors in host memory, got one on {tensor.device}: device memory is not supported, "
                f"even by an MPI that reads it; copy the tensor to the CPU, or set PACELINE_LINK={LINK} on every node"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"link 'mpi' needs a contiguous tensor, got strides {tensor.stride()}; call contiguous()")
        place = self._library.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        count = tensor.numel() if num_values is None else num_values
        return [place, count, kind or self._library.widths[tensor.itemsize]]

    def sum(self, tensor: Tensor, what: str = "sum") -> transport.Handle:
        return self._reduce("sum", tensor, what)

    def max(self, tensor: Tensor, what: str = "max") -> transport.Handle:
        return self._reduce("max", tensor, what)

    def _reduce(self, kind: str, tensor: Tensor, what: str) -> transport.Handle:
        operation, dtype = self._library.operation(kind, tensor.dtype), self._library.types[tensor.dtype]
        into = self._memory(tensor, kind=dtype)
        if not tensor.numel():
            return _Handle(self, what, lambda: tensor)
        # not in place: with MPI_IN_PLACE the library cannot use its faster algorithms
        own = tensor.detach().clone()
        out = self._memory(own, kind=dtype)
        start = partial(self._comm.Iallreduce, out, into, operation)
        return self._begin(kind, tensor.nbytes, what, start, lambda: tensor, own, tensor)

    def all_gather(self, tensor: Tensor, what: str = "all-gather", even: bool = False) -> transport.Handle:
        tensor = tensor.detach().contiguous()
        rows = [len(tensor)] * self.size
        if not even:
            own = torch.tensor([len(tensor)], dtype=torch.int64)
            rows = [int(r) for r in self.all_gather(own, f"sizes of {what}", even=True).wait()]
        # (all ranks' rows, ...)
        whole = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        parts = list(torch.split(whole, rows))
        if not whole.numel():
            return _Handle(self, what, lambda: parts)
        out = self._memory(tensor)
        if len(set(rows)) == 1:
            start = partial(self._comm.Iallgather, out, self._memory(whole, tensor.numel()))
        else:
            start = partial(self._comm.Iallgatherv, out, self._memory(whole, [part.numel() for part in parts]))
        return self._begin("all-gather", tensor.nbytes, what, start, lambda: parts, tensor, whole)

    def reduce_scatter(self, tensor: Tensor, what: str = "reduce-scatter") -> transport.Handle:
        operation, dtype = self._library.operation("sum", tensor.dtype), self._library.types[tensor.dtype]
        tensor = tensor.detach().contiguous()
        # (size * n, ...) -> (n, ...)
        own = tensor.new_empty((len(tensor) // self.size, *tensor.shape[1:]))
        out, into = self._memory(tensor, own.numel(), dtype), self._memory(own, kind=dtype)
        if not tensor.numel():
            return _Handle(self, what, lambda: own)
        start = partial(self._comm.Ireduce_scatter_block, out, into, operation)
        return self._begin("reduce-scatter", tensor.nbytes, what, start, lambda: own, tensor, own)

    def broadcast(self, tensor: Tensor, root: int = 0, what: str = "broadcast") -> transport.Handle:
        start = partial(self._comm.Ibcast, self._memory(tensor), root)
        if not tensor.numel():
            return _Handle(self, what, lambda: tensor)
        return self._begin("broadcast", tensor.nbytes, what, start, lambda: tensor, tensor)

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> transport.Handle:
        start = partial(self._comm.Isend, self._memory(tensor), peer, tag)
        return self._begin("send", tensor.nbytes, f"send to rank {peer}", start, lambda: tensor, tensor)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> transport.Handle:
        start = partial(self._comm.Irecv, self._memory(tensor), peer, tag)
        return self._begin("recv", tensor.nbytes, f"receive from rank {peer}", start, lambda: tensor, tensor)

    def cost(self, operation: str, num_bytes: int) -> CommCost:
        size, others, rounds = self.size, self.size - 1, math.ceil(math.log2(self.size))
        if operation in ("sum", "max"):
            return CommCost(2 * rounds, 2 * others * num_bytes // size)
        if operation == "all-gather":
            return CommCost(others, others * num_bytes)
        if operation == "reduce-scatter":
            return CommCost(2 * rounds, others * (size + 1) * num_bytes // size**2)
        if operation == "broadcast":
            return CommCost(rounds, others * num_bytes // size)
        return CommCost(1, 0 if operation == "recv" else num_bytes)

    def failure(self, what: str, waited_s: float, error: Exception | None = None) -> LinkError:
        """The error for a failed operation: which peer, on which host, after how long a wait."""
        peer = self.detector.verdict(2.5 if error else 0.0) if self.detector else None
        return loss(self, peer, what, waited_s, error)

    def cut_off(self, what: str, waited_s: float, address: str) -> LinkError:
        """The error for a node that no longer answers this one, though rank 0 may reach both."""
        peer = self.detector.verdict(1.0) if self.detector else None
        if peer is not None:
            return self.failure(what, waited_s)
        return LinkError(
            f"no answer from {address} during {what} (waited {waited_s:.1f} s) for {SILENT_S} s, though rank 0 may "
            f"hear it; look at the network between the two"
        )

    def close(self) -> None:
        if self.detector and self.detector.dead:
            return
        if self.detector:
            self.detector.close()
        self._library.unclosed.discard(self)


class _Handle(transport.Handle):
    """``flight``: None where the tensor is empty."""

    def __init__(self, link: Link, what: str, result: Callable[[], Any], flight: Flight | None = None):
        self.link, self.what, self.result, self.flight = link, what, result, flight

    def done(self) -> bool:
        return self.flight is None or self.flight.ended.is_set()

    def wait(self, deadline_s: float | None = None) -> Any:
        with self.link.waiting(self.what):
            return self._wait(TIMEOUT_S if deadline_s is None else deadline_s)

    def _wait(self, patience_s: float) -> Any:
        start, flight, detector = time.monotonic(), self.flight, self.link.detector
        while flight and not self.link._library.progress.wait(flight, min(POLL_S, patience_s)):
            waited_s = time.monotonic() - start
            if waited_s > SILENT_S and (address := unanswered(self.link._addresses)) and not self.done():
                raise self.link.cut_off(self.what, waited_s, address)
            if detector and (detector.dead or (detector.left and waited_s > LEFT_S)) and not self.done():
                raise self.link.failure(self.what, waited_s)
            if waited_s >= patience_s and not self.done():
                raise LinkError(f"gave up on {self.what} after {waited_s:.0f} s; no peer is known to be dead")
        if flight and flight.error:
            raise self.link.failure(self.what, time.monotonic() - start, flight.error)
        return self.result()


class _Bulletin:
    """The part of a store that the heartbeat needs: rank 0 sends one value, all others receive it."""

    def __init__(self, link: Link):
        self.link = link

    def set(self, key: str, value: str) -> None:
        self.link.broadcast(_encoded(value), 0, f"the address of the {key}").wait(JOIN_S)

    def get(self, key: str) -> bytes:
        return bytes(self.link.broadcast(_encoded(""), 0, f"the address of the {key}").wait(JOIN_S).tolist())


def _encoded(text: str) -> Tensor:
    return torch.tensor(list(text.encode()[:NAME_BYTES].ljust(NAME_BYTES)), dtype=torch.uint8)


def _address(host: str, names: list[str], all_addresses: list[list[str]]) -> str:
    """Rank 0's address for the others: ``host``, or the local address of the route to the first remote rank."""
    _, given = _resolve(host or "127.0.0.1")
    remote = next((rank for rank, name in enumerate(names) if name != names[0]), None)
    if not is_loopback(given) or remote is None:
        return given
    # its name may not resolve, and an address that rank 0 has, too, is one of rank 0's own machine
    for target in (names[remote], *(each for each in all_addresses[remote] if each not in all_addresses[0])):
        with contextlib.suppress(OSError):
            family, address = _resolve(target)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends no packet: looks up the routing table
                if not is_loopback(found := str(probe.getsockname()[0])):
                    return found
    raise OSError(f"no route from {names[0]} to {names[remote]}")


def _resolve(host: str) -> tuple[int, str]:
    """(family, address), IPv4 first."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])
