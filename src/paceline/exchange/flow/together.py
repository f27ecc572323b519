"""Runs of codecs: one that must be as it was declared; several as one, whose payloads are sent in one message; and one
on a link, round after round."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.contract import Codec
from paceline.messages import (
    ALL_GATHER,
    FACTORS,
    MAX,
    REDUCE_SCATTER,
    SHIFT,
    Bucket,
    CodecRun,
    Coded,
    Collective,
    StepContext,
)
from paceline.transport import Handle, Link


def joined(parts: Sequence[Tensor]) -> Tensor:
    """All values of a bucket, on the device of the first: its parameters may lie on several."""
    return torch.cat([part.reshape(-1).to(parts[0].device) for part in parts])


def declared(codec: Codec, bucket: Bucket, values: Tensor, state: Any, context: StepContext) -> CodecRun:
    """`Codec.run`. Raises TypeError that names the codec if it is not what `Codec.rounds` has said."""
    rounds, shape, dtype = codec.rounds(bucket, context.size, values.dtype), values.shape, values.dtype
    run, result = codec.run(bucket, values, state, context), None
    if not isinstance(run, Generator):
        raise _broken(codec, f"run() is a generator, which yields each Collective of rounds(); it is {type(run)}")
    for number, each in enumerate(rounds, 1):
        try:
            collective = run.send(result)
        except StopIteration:
            raise _broken(codec, f"run() ended before collective {number} of {len(rounds)} in rounds()") from None
        found = collective.operation, collective.even
        if found != (each.operation, each.even) or collective.payload.nbytes > each.max_bytes:
            raise _broken(
                codec,
                f"collective {number} in rounds() is {each.operation!r}, even={each.even}, of at most {each.max_bytes} "
                f"bytes, and run() yields {found[0]!r}, even={found[1]}, of {collective.payload.nbytes} bytes",
            )
        result = yield collective
    try:
        run.send(result)
    except StopIteration as end:
        coded = end.value
    else:
        raise _broken(codec, f"run() yields more collectives than the {len(rounds)} in rounds()")
    if not isinstance(coded, Coded):
        raise _broken(codec, f"run() returns a Coded; it returned {type(coded)}")
    total, first = coded.total, 1 if bucket.kind == FACTORS else 0  # all nodes' rows of factors are one below the other
    if total.dtype != dtype or total.shape[first:] != shape[first:]:
        raise _broken(codec, f"the total of values {tuple(shape)}, {dtype}, is {tuple(total.shape)}, {total.dtype}")
    return coded


def _broken(codec: Codec, how: str) -> TypeError:
    return TypeError(
        f"codec {type(codec).__module__}:{type(codec).__qualname__} is not as paceline.contract.Codec: {how}"
    )


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
