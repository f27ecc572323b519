"""All-reduce (sum) by a named algorithm of `collectives/`, over any link's send and recv, with its exact cost.

All ranks end with the same bits: one rank adds up an element, in the tensor's own type, and the others copy it. The
order of summation depends only on the algorithm and on the numbers of ranks and elements.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from paceline.link import collectives
from paceline.link.net.collective_rounds import Message, Rounds, packed, there_and_back
from paceline.messages import CommCost
from paceline.transport import Link

TAG = 0x5EED  # of the messages of a sum


@dataclass(frozen=True)
class Traffic(CommCost):
    """A sum's exact cost: ``bytes`` and ``flops`` are those of the rank that sends, or adds, most.

    ``serial_bytes``: the largest message of each step, summed over the steps.
    ``messages``, ``total_bytes``: of all ranks.
    """

    serial_bytes: float = 0.0
    total_bytes: float = 0.0
    messages: int = 0

    @property
    def in_sequence(self) -> float:
        return self.serial_bytes


def seconds(cost: CommCost, alpha_s: float, beta_s_per_byte: float) -> float:
    """The alpha-beta cost: a message takes ``alpha_s`` + bytes * ``beta_s_per_byte``; steps follow one another."""
    return cost.steps * alpha_s + cost.in_sequence * beta_s_per_byte


def names() -> tuple[str, ...]:
    """All algorithms, sorted: the modules of `collectives/`."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(collectives.__path__)))


class Collective:
    """A sum by the algorithm of that name. Raises ValueError for an unknown one."""

    def __init__(self, name: str):
        if name not in names():
            close = difflib.get_close_matches(name, names(), n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"no collective named {name!r}; known: {', '.join(names())}{hint}")
        self.name = name

    def rounds(self, size: int, count: int, nodes: Sequence[Hashable] = ()) -> Rounds:
        """The messages of each round. ``nodes[rank]``: its node; by default each rank is a node of its own."""
        return _rounds(self.name, size, count, self._places(size, nodes))

    def _places(self, size: int, nodes: Sequence[Hashable]) -> tuple[Hashable, ...]:
        if nodes and len(nodes) != size:
            raise ValueError(f"nodes must name the node of each of {size} ranks, got {len(nodes)} of them")
        return tuple(nodes) or tuple(range(size))

    def cost(self, size: int, num_bytes: int, itemsize: int = 4, nodes: Sequence[Hashable] = ()) -> Traffic:
        """Of one sum of ``num_bytes`` on each of ``size`` ranks, in elements of ``itemsize`` bytes."""
        if num_bytes % itemsize:
            raise ValueError(f"{num_bytes} bytes are no whole number of elements of {itemsize} bytes")
        return _traffic(self.name, size, num_bytes // itemsize, itemsize, self._places(size, nodes))

    def run(
        self,
        link: Link,
        tensor: Tensor,
        nodes: Sequence[Hashable] | None = None,
        tag: int = TAG,
        deadline_s: float | None = None,
    ) -> Tensor:
        """Adds all ranks' tensors into each; returns the tensor.

        ``nodes``: as in `rounds`; by default the link's hosts. ``deadline_s``: of each message.
        Raises LinkError.
        """
        places = tuple(link.hosts if nodes is None else nodes)
        flat = tensor.detach().reshape(-1)
        buffer = torch.empty_like(flat)
        for out, into in _own_rounds(self.name, link.size, flat.numel(), places, link.rank):
            if into:
                place = flat[into.start : into.stop]
                received = (buffer if into.add else flat)[into.start : into.stop]
                receiving = link.recv(received, into.source, tag)
            if out:
                sending = link.send(flat[out.start : out.stop], out.target, tag)
            if into:
                receiving.wait(deadline_s)
                if into.add:
                    place += received
            if out:
                sending.wait(deadline_s)
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view_as(tensor))
        return tensor


@lru_cache(maxsize=256)
def _rounds(name: str, size: int, count: int, nodes: tuple[Hashable, ...]) -> Rounds:
    algorithm = importlib.import_module(f".{name}", collectives.__name__)
    return there_and_back(packed(algorithm.reduce(range(size), count, nodes)))


@lru_cache(maxsize=4096)  # called for each layer of the model at every step
def _traffic(name: str, size: int, count: int, itemsize: int, nodes: tuple[Hashable, ...]) -> Traffic:
    rounds = _rounds.__wrapped__(name, size, count, nodes)  # uncached: rounds are large, and only totals are kept
    everything = [message for one in rounds for message in one]
    sent, added = [0] * size, [0] * size
    for message in everything:
        sent[message.source] += message.length
        added[message.target] += message.length * message.add
    return Traffic(
        steps=len(rounds),
        bytes=max(sent) * itemsize,
        flops=max(added),
        serial_bytes=sum(max(message.length for message in one) for one in rounds) * itemsize,
        total_bytes=sum(sent) * itemsize,
        messages=len(everything),
    )


@lru_cache(maxsize=256)
def _own_rounds(
    name: str, size: int, count: int, nodes: tuple[Hashable, ...], rank: int
) -> tuple[tuple[Message | None, Message | None], ...]:
    """(the message that this rank sends, the message that it receives) in each round, without rounds of neither."""
    own = []
    for one in _rounds(name, size, count, nodes):
        out = next((message for message in one if message.source == rank), None)
        into = next((message for message in one if message.target == rank), None)
        if out or into:
            own.append((out, into))
    return tuple(own)
