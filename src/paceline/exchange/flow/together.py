"""Runs of codecs: several as one, whose payloads are sent in one message; and one on a link, round after round."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from paceline.messages import ALL_GATHER, MAX, CodecRun, Coded, Collective
from paceline.transport import Handle, Link


def together(runs: Sequence[CodecRun]) -> Generator[Collective, Any, list[Coded]]:
    """Runs of the same rounds, which are even, on flat payloads of one type. Returns each one's result."""
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
        lengths = [len(each.payload) for each in wanted]
        whole = yield Collective(wanted[0].operation, torch.cat([each.payload for each in wanted]))
        if wanted[0].operation == ALL_GATHER:
            replies = list(zip(*(part.split(lengths) for part in whole), strict=True))
        else:
            replies = whole.split(lengths)


def begin(collective: Collective, link: Link, what: str) -> Handle:
    if collective.operation == ALL_GATHER:
        return link.all_gather(collective.payload, what, even=collective.even)
    return (link.max if collective.operation == MAX else link.sum)(collective.payload, what)


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
