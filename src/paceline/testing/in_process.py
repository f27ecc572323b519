"""Codecs of several nodes in one process, without a link: for tests of codecs, and simulations."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from paceline.messages import ALL_GATHER, MAX, REDUCE_SCATTER, SHIFT, SUM, CodecRun, Coded, Collective

Result = TypeVar("Result")


def in_process(runs: Sequence[Generator[Collective, Any, Result]]) -> tuple[list[Result], list[list[Collective]]]:
    """(each node's result, its collectives). ``runs``: of all nodes, in rank order."""
    replies: list[Any] = [None] * len(runs)
    results, done = list[Result](), [list[Collective]() for _ in runs]
    while True:
        wanted = list[Collective]()
        for run, reply in zip(runs, replies, strict=True):
            try:
                wanted.append(run.send(reply))
            except StopIteration as end:
                results.append(end.value)
        if results:
            assert not wanted, "the nodes' codecs have unlike numbers of rounds"
            return results, done
        assert len({(each.operation, each.even) for each in wanted}) == 1, "the nodes run unlike collectives"
        for each, own in zip(done, wanted, strict=True):
            each.append(Collective(own.operation, own.payload.clone(), own.even))
        payloads = [each[-1].payload for each in done]
        operation = wanted[0].operation
        if operation == ALL_GATHER:
            replies = [[part.clone() for part in payloads] for _ in runs]
        elif operation == SHIFT:
            replies = [payloads[rank - 1].clone() for rank in range(len(runs))]
        else:
            replies = [_combined(own.payload, payloads, operation == MAX) for own in wanted]
        if operation == REDUCE_SCATTER:
            replies = [each.chunk(len(runs))[rank] for rank, each in enumerate(replies)]


def recorded(run: CodecRun, received: list[Any]) -> CodecRun:
    """The same run, whose collectives' results are also appended to ``received``."""
    result: Any = None
    while True:
        try:
            result = yield run.send(result)
        except StopIteration as end:
            coded: Coded = end.value
            return coded
        received.append([each.clone() for each in result] if isinstance(result, list) else result.clone())


def replayed(run: CodecRun, received: Sequence[Any]) -> Coded:
    """The result of a run whose collectives give what another has ``received``."""
    result: Any = None
    for each in received:
        collective = run.send(result)
        in_place = collective.operation in (SUM, MAX)
        result = collective.payload.copy_(each) if in_place else copy.deepcopy(each)
    try:
        run.send(result)
    except StopIteration as end:
        coded: Coded = end.value
        return coded
    raise AssertionError(f"the codec has more than {len(received)} rounds, as many as it had before")


def _combined(own: Tensor, payloads: Sequence[Tensor], largest: bool) -> Tensor:
    """In the memory of ``own``, as a link does it."""
    own.copy_(payloads[0])
    for payload in payloads[1:]:
        own = own.copy_(own.maximum(payload)) if largest else own.add_(payload)
    return own
