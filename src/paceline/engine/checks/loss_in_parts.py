"""Check that the loss of a batch is the mean over its parts: once, by calling it on some samples and on two parts.

A step combines the losses of processes and micro-batches, each of its own samples. A loss that compares the samples of
a batch with each other (in-batch negatives, a correlation over the batch), or that divides by a number of its own, has
another value in parts. The model is not called again: its output is cut.

*Cost*: four calls of the loss on at most ROWS samples, without gradients, in the first step alone.
"""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.engine.compute.batch import count, cut, judged, leaves

ROWS, FIRST = 8, 3  # samples, and those in the first part: two halves would hide a dependence on their number
NEAR, NEAR_LOW = 1e-3, 5e-2  # relative, for rounding: in float32 and better, in 16 bits
SCORES = "logits_per_"  # name prefix in `transformers` of each sample's scores for all others of a batch
WRITES = {"STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR"}
REMEDY = (
    "so several processes or micro-batches, each of which sees its own samples alone, train another loss than one: "
    "`paceline verify` names the cause, and docs/same.md says what to do"
)


def unlike(loss: Callable[..., Any] | None, output: Any, batch: Any, rows: int | None) -> str:
    """One line where the loss is not the mean of its parts; empty where it is, or where that is unknown. ``rows``: as
    in `judged`."""
    if loss is None:
        return _scores(output)
    try:
        rows = count(batch) if rows is None else rows
        found = _values(loss, output, batch, rows)
    except Exception:  # a loss may fail on a part of a batch: then nothing is known
        return ""
    if found is None:
        return ""
    whole, apart = found
    return (
        f"the loss of {min(ROWS, rows)} samples is {whole:.6g}, and the mean of the losses of two parts of them is "
        f"{apart:.6g}: it compares the samples of a batch with each other (in-batch negatives), or divides by "
        f"something other than samples; {REMEDY}"
    )


def _values(loss: Callable[..., Any], output: Any, batch: Any, rows: int) -> tuple[float, float] | None:
    """(the loss of some samples, the mean over two parts of them) where they differ, else None."""
    own = _apart(loss)
    if own is None or rows < 2 or count(batch) != rows or not _divides(output, rows):
        return None
    many = min(ROWS, rows)
    first = min(FIRST, many // 2)

    def of(*edges: int) -> float:
        total = weight = 0.0
        for start, stop in pairwise(edges):
            value, times, part_weight, _ = judged(own, _cut(output, start, stop, rows), cut(batch, start, stop, rows))
            total, weight = total + float(value) * times, weight + part_weight
        return total / weight

    with torch.no_grad(), _NoDraws():  # type: ignore[no-untyped-call]
        whole, again, apart = of(0, many), of(0, many), of(0, first, many)
    low = any(each.dtype in (torch.float16, torch.bfloat16) for each in leaves(_plain(output)))
    near = (NEAR_LOW if low else NEAR) * max(abs(whole), abs(apart))
    if whole != again or not abs(whole - apart) > near:  # the loss has state, is not finite, or is equal
        return None
    return whole, apart


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, random draws of this thread raise. Restoring the generator afterwards instead would repeat draws
    of other threads, such as a data loader's."""

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} draws random numbers")
        return func(*args, **(kwargs or {}))


def _apart(loss: Any) -> Callable[..., Any] | None:
    """A loss whose calls change no state, or a copy with its own state; None where that is not known."""
    if isinstance(loss, nn.Module):
        return copy.deepcopy(loss)  # its buffers
    if isinstance(loss, types.FunctionType):
        return None if _writes(loss.__code__) else loss
    if isinstance(loss, functools.partial):
        return None if _apart(loss.func) is None else loss
    return loss if isinstance(loss, types.BuiltinFunctionType) else None


def _writes(code: types.CodeType) -> bool:
    """Whether it changes state outside of it, such as counters or lists."""
    outside = set(code.co_freevars)
    return any(
        each.opname in WRITES or (each.opname == "STORE_DEREF" and each.argval in outside)
        for each in dis.get_instructions(code)
    )


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output


def _divides(output: Any, rows: int) -> bool:
    """Whether all of its tensors have one row per sample."""
    output = _plain(output)
    if isinstance(output, Tensor):
        return output.dim() > 0 and len(output) == rows
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return bool(parts) and all(part is None or _divides(part, rows) for part in parts)


def _cut(output: Any, start: int, stop: int, rows: int) -> Any:
    part = cut(output, start, stop, rows)
    # a ModelOutput's keys are attributes, too
    return type(output)(**part) if isinstance(output, Mapping) and type(output) is not dict else part


def _scores(output: Any) -> str:
    """For a model that computes its own loss: one line where its output has scores of samples for each other."""
    named = [name for name in output if str(name).startswith(SCORES)] if isinstance(output, Mapping) else []
    if not named:
        return ""
    return f"the model's own loss compares the samples of a batch with each other ({', '.join(named)}); {REMEDY}"
