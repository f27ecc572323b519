"""TLS 1.3 transport between all nodes, directly from each to each.

*Cost* (N ranks, n bytes): sum and max: each rank reduces one slice and sends it to all: 2 (N - 1) / N n bytes per
rank; all-gather: (N - 1) n bytes; broadcast: a binomial tree. All else is as in `link.gloo`: the rendezvous and the
heartbeat, whose messages are encrypted here, too, and the handling of failures.
*Invariants*: values are added up in rank order, so all ranks end with the same bits. Needs the run's secret.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from paceline.link import gloo as plain
from paceline.link.net.auth import EncryptionKey, secret_of_environment
from paceline.link.net.collective_rounds import bounds
from paceline.link.net.route import REACH_S
from paceline.link.net.tls_mesh import Identity, Mesh, check
from paceline.link.net.tls_messages import Mail, Work

SLICE_BYTES = 4 << 20  # of a sum, for each rank: while one is added up, others are being sent
MARGIN_S = 0.5  # the mesh times out so much earlier than the caller's wait, so that its error is reported
SUM, GATHER, SPREAD, SCATTER, MAIL = b"s", b"g", b"b", b"t", b"m"
HALVES = torch.bfloat16, torch.float16

dist: Any = torch.distributed  # its stubs leave out what we use


class Link(plain.Link):
    """One node's end, as `link.gloo`'s. Raises ValueError without PACELINE_SECRET, or the package cryptography."""

    carrier, hides, accumulates_fp32 = "TLS", True, True
    package = ("cryptography", "encrypt")

    @staticmethod
    def secret() -> bytes:
        check()
        if not (secret := secret_of_environment()):
            raise ValueError(
                "encryption needs a secret, and PACELINE_SECRET is not set; `paceline run` generates one for each run: "
                "where ranks are started in another way, set the same on all of them, such as the output of "
                "`openssl rand -hex 32`"
            )
        return EncryptionKey(secret)

    def _introduce(self) -> None:
        self._identity = Identity()
        self.store.set(f"certificate/{self.rank}", self._identity.certificate)
        keys = [f"certificate/{rank}" for rank in range(self.size)]
        self._certificates = [bytes(certificate) for certificate in self.store.multi_get(keys)]

    def _connect(self, store: Any) -> Any:
        limit_s = REACH_S - MARGIN_S
        mesh = Mesh(self.rank, self.members, self._identity, self._certificates, store, limit_s)
        return _Group(mesh, {member.rank: member.address for member in self.members})

    def abandon(self) -> None:
        for group in self._groups:
            group.close()
        super().abandon()


class _Group:
    """One lane's collectives, with the interface of gloo's process group. All ranks call them in one order."""

    def __init__(self, mesh: Mesh, addresses: dict[int, str]):
        self.rank, self.size = mesh.rank, len(mesh.members)
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self._mesh, self._mail = mesh, Mail(mesh.out, mesh.into, addresses)
        self._numbers = itertools.count()

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Work:
        (tensor,) = tensors
        flat, number = _flat(tensor), next(self._numbers)
        step = self.size * max(1, SLICE_BYTES // flat.itemsize)
        blocks = [flat[start : start + step] for start in range(0, len(flat), step)]
        whole = Work(3 * len(blocks) * len(self.others), _copy_back(flat, tensor))
        for part, block in enumerate(blocks):
            self._add_up(block, number, 2 * part, options.reduceOp == dist.ReduceOp.MAX, whole)
        return whole

    def _add_up(self, block: Tensor, number: int, part: int, largest: bool, whole: Work) -> None:
        """Every rank receives its slice from all, reduces it, and sends the result to all."""
        cuts = bounds(len(block), self.size)
        slices = [block[start:stop] for start, stop in itertools.pairwise(cuts)]
        own = slices[self.rank]
        received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]

        def send_result() -> None:
            # 16-bit values are added in fp32, and rounded once
            added = received[0].float() if own.dtype in HALVES else received[0].clone()
            for one in received[1:]:
                _combine(added, one.to(added.dtype), largest)
            own.copy_(added)
            for peer in self.others:
                self._mail.send(peer, (SUM, number, part + 1), _octets(own), whole)

        reduction = Work(len(self.others), send_result, whole)
        for peer in self.others:
            self._mail.receive(peer, (SUM, number, part), _octets(received[peer]), reduction)
            # safe to overwrite: a peer sends the result only after it has received this rank's slice
            self._mail.receive(peer, (SUM, number, part + 1), _octets(slices[peer]), whole)
        for peer in self.others:
            self._mail.send(peer, (SUM, number, part), _octets(slices[peer]), whole)

    def allgather(self, results: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> Work:
        (parts,), (tensor,) = results, tensors
        key, flats = (GATHER, next(self._numbers), 0), [_flat(part) for part in parts]
        own = _flat(tensor)
        flats[self.rank].copy_(own)

        def copy_back() -> None:
            for flat, part in zip(flats, parts, strict=True):
                _copy_back(flat, part)()

        whole = Work(2 * len(self.others), copy_back)
        for peer in self.others:
            self._mail.receive(peer, key, _octets(flats[peer]), whole)
            self._mail.send(peer, key, _octets(own), whole)
        return whole

    def alltoall_base(
        self, into: Tensor, out: Tensor, into_splits: list[int], out_splits: list[int], options: Any
    ) -> Work:
        """The parts of ``out`` go to the ranks in order; without sizes they are even."""
        key, received, sent = (SCATTER, next(self._numbers), 0), _flat(into), _flat(out)
        even = [len(sent) // self.size] * self.size
        parts = list(
            zip(torch.split(received, into_splits or even), torch.split(sent, out_splits or even), strict=True)
        )
        parts[self.rank][0].copy_(parts[self.rank][1])
        whole = Work(2 * len(self.others), _copy_back(received, into))
        for peer in self.others:
            self._mail.receive(peer, key, _octets(parts[peer][0]), whole)
            self._mail.send(peer, key, _octets(parts[peer][1]), whole)
        return whole

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Work:
        (tensor,), root = tensors, options.rootRank
        key, flat = (SPREAD, next(self._numbers), 0), _flat(tensor)
        place = (self.rank - root) % self.size
        children = [(child + root) % self.size for child in _children(place, self.size)]
        whole = Work(len(children) + (place > 0), _copy_back(flat, tensor))

        def forward() -> None:
            for peer in children:
                self._mail.send(peer, key, _octets(flat), whole)
            if place:
                whole.part_done()

        if place:
            parent = ((place & (place - 1)) + root) % self.size
            self._mail.receive(parent, key, _octets(flat), Work(1, forward, whole))
        else:
            forward()
        return whole

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        whole = Work(1)
        self._mail.send(peer, (MAIL, tag, 0), _octets(_flat(tensors[0])), whole)
        return whole

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        flat = _flat(tensors[0])
        whole = Work(1, _copy_back(flat, tensors[0]))
        self._mail.receive(peer, (MAIL, tag, 0), _octets(flat), whole)
        return whole

    def close(self) -> None:
        self._mail.close()
        self._mesh.close()


def _children(place: int, size: int) -> list[int]:
    """The children in a binomial tree over 0 .. size - 1, largest subtree first: of 0 .. 4, 2, 1; of 4 6, 5; of 6 7."""
    lowest = place & -place or size
    strides = itertools.takewhile(lambda stride: stride < lowest, (1 << k for k in itertools.count()))
    return [place + stride for stride in reversed(list(strides)) if place + stride < size]


def _flat(tensor: Tensor) -> Tensor:
    """The values, contiguous in host memory: a view where the tensor is so already."""
    return tensor.detach().cpu().contiguous().view(-1)


def _copy_back(flat: Tensor, tensor: Tensor) -> Callable[[], None]:
    def copy() -> None:
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    return copy


def _octets(flat: Tensor) -> memoryview:
    values: Any = flat.view(torch.uint8).numpy()
    return memoryview(values)


def _combine(into: Tensor, one: Tensor, largest: bool) -> None:
    """In numpy, so with one thread: the node's other cores compute."""
    values = into.numpy()
    with np.errstate(all="ignore"):  # the caller checks whether the sum is finite
        (np.maximum if largest else np.add)(values, one.numpy(), out=values)
