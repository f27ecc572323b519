"""TLS 1.3 transport between all nodes, directly from each to each.

*Cost* (N ranks, n bytes): sum and max: each adds up its slice and tells all: 2 (N - 1) / N n bytes per rank;
all-gather: (N - 1) n bytes; broadcast: a binomial tree. As `link.gloo` in all else: the meeting, whose words are
hidden here as well as sealed, the heartbeat, likewise, and who goes on after a loss.
*Laws*: values are added up in rank order, so all ranks end with the same bits. Needs the run's secret.
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

SLICE_BYTES = 4 << 20  # of a sum, for each rank: while one is added up, others are on their way
MARGIN_S = 0.5  # in which a lane that is not connected says so, before it is given up
SUM, GATHER, SPREAD, MAIL = b"s", b"g", b"b", b"m"
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
                "encryption needs a secret, and PACELINE_SECRET is not set; `paceline run` "
                "makes one for each run: where ranks are started in another way, give all of them the same, such as "
                "`openssl rand -hex 32` prints"
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
    """One lane's collectives, called as gloo's process group is. All ranks call them in one order."""

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
        whole = Work(3 * len(blocks) * len(self.others), _back(flat, tensor))
        for part, block in enumerate(blocks):
            self._add_up(block, number, 2 * part, options.reduceOp == dist.ReduceOp.MAX, whole)
        return whole

    def _add_up(self, block: Tensor, number: int, part: int, largest: bool, whole: Work) -> None:
        """Every rank is sent its slice by all, and sends what has become of it to all."""
        cuts = bounds(len(block), self.size)
        slices = [block[start:stop] for start, stop in itertools.pairwise(cuts)]
        mine = slices[self.rank]
        landed = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]

        def spread() -> None:
            # 16 bits are added in 32, and rounded once
            added = landed[0].float() if mine.dtype in HALVES else landed[0].clone()
            for one in landed[1:]:
                _combine(added, one.to(added.dtype), largest)
            mine.copy_(added)
            for peer in self.others:
                self._mail.send(peer, (SUM, number, part + 1), _octets(mine), whole)

        here = Work(len(self.others), spread, whole)
        for peer in self.others:
            self._mail.receive(peer, (SUM, number, part), _octets(landed[peer]), here)
            # what comes back into a slice is made of what has left it
            self._mail.receive(peer, (SUM, number, part + 1), _octets(slices[peer]), whole)
        for peer in self.others:
            self._mail.send(peer, (SUM, number, part), _octets(slices[peer]), whole)

    def allgather(self, results: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> Work:
        (parts,), (tensor,) = results, tensors
        key, flats = (GATHER, next(self._numbers), 0), [_flat(part) for part in parts]
        mine = _flat(tensor)
        flats[self.rank].copy_(mine)

        def back() -> None:
            for flat, part in zip(flats, parts, strict=True):
                _back(flat, part)()

        whole = Work(2 * len(self.others), back)
        for peer in self.others:
            self._mail.receive(peer, key, _octets(flats[peer]), whole)
            self._mail.send(peer, key, _octets(mine), whole)
        return whole

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Work:
        (tensor,), root = tensors, options.rootRank
        key, flat = (SPREAD, next(self._numbers), 0), _flat(tensor)
        place = (self.rank - root) % self.size
        below = [(child + root) % self.size for child in _children(place, self.size)]
        whole = Work(len(below) + (place > 0), _back(flat, tensor))

        def pass_on() -> None:
            for peer in below:
                self._mail.send(peer, key, _octets(flat), whole)
            if place:
                whole.did()

        if place:
            above = ((place & (place - 1)) + root) % self.size
            self._mail.receive(above, key, _octets(flat), Work(1, pass_on, whole))
        else:
            pass_on()
        return whole

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        whole = Work(1)
        self._mail.send(peer, (MAIL, tag, 0), _octets(_flat(tensors[0])), whole)
        return whole

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        flat = _flat(tensors[0])
        whole = Work(1, _back(flat, tensors[0]))
        self._mail.receive(peer, (MAIL, tag, 0), _octets(flat), whole)
        return whole

    def close(self) -> None:
        self._mail.close()
        self._mesh.close()


def _children(place: int, size: int) -> list[int]:
    """Of a binomial tree over 0 .. size - 1, that with most below it first: 0 has .. 4, 2, 1; 4 has 6, 5; 6 has 7."""
    lowest = place & -place or size
    strides = itertools.takewhile(lambda stride: stride < lowest, (1 << k for k in itertools.count()))
    return [place + stride for stride in reversed(list(strides)) if place + stride < size]


def _flat(tensor: Tensor) -> Tensor:
    """Its values in this machine's memory, one after another: itself where it is so."""
    return tensor.detach().cpu().contiguous().view(-1)


def _back(flat: Tensor, tensor: Tensor) -> Callable[[], None]:
    def back() -> None:
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    return back


def _octets(flat: Tensor) -> memoryview:
    values: Any = flat.view(torch.uint8).numpy()
    return memoryview(values)


def _combine(into: Tensor, one: Tensor, largest: bool) -> None:
    """With one thread: the others of this node compute."""
    ours = into.numpy()
    with np.errstate(all="ignore"):  # a sum that is not finite is seen by whoever asked for it
        (np.maximum if largest else np.add)(ours, one.numpy(), out=ours)
