"""Runs of codecs: several as one, whose payloads are sent in one message; and one on a link, round after round."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.messages import ALL_GATHER, MAX, REDUCE_SCATTER, SHIFT, CodecRun, Coded, Collective
from paceline.transport import Handle, Link


def joined(parts: Sequence[Tensor]) -> Tensor:
    """All values of a bucket, on the device of the first: its parameters may lie on several."""
    return torch.cat([part.reshape(-1).to(parts[0].device) for part in parts])


def together(runs: Sequence[CodecRun]) -> Generator[Collective, Any, list[Coded]]:
    """Runs of the same rounds, which are even, on payloads of one type, (n,) or (size, n). Returns all results."""
    if len(runs) == 1:
        return [(yield from runs[0])]
    replies: Sequence[Any] = [None] * len(runs)
    while True:
        wanted, coded = list[Collective](), list[Coded]()
        for run, reply in zip(runs, replies, strict=True):
            try:
                wanted.append(run.send(reply))
            except StopIteration as end:
                coded.append(end.value)
        if coded:
            assert not wanted, "codecs of one message have unlike numbers of rounds"
            return coded
        lengths = [each.payload.shape[-1] for each in wanted]
        whole = yield Collective(wanted[0].operation, torch.cat([each.payload for each in wanted], dim=-1))
        if wanted[0].operation == ALL_GATHER:
            replies = list(zip(*(part.split(lengths) for part in whole), strict=True))
        else:
            replies = whole.split(lengths, dim=-1)


def begin(collective: Collective, link: Link, what: str) -> Handle:
    operation, payload = collective.operation, collective.payload
    if operation == ALL_GATHER:
        return link.all_gather(payload, what, even=collective.even)
    if operation == REDUCE_SCATTER:
        return link.reduce_scatter(payload, what)
    if operation == SHIFT:
        return link.shift(payload, what)
    return (link.max if operation == MAX else link.sum)(payload, what)


def over_link(run: CodecRun, link: Link, what: str) -> Coded:
    """The result of a codec whose collectives run now, one after the other. Raises LinkError."""
    result: Any = None
    while True:
        try:
            collective = run.send(result)
        except StopIteration as end:
            coded: Coded = end.value
            return coded
        result = begin(collective, link, what).wait()
