"""Batches: a tensor, a tuple (inputs ..., target), a dict, or a nesting of these; calls of model and loss on them.

    tuple, list    model(*all but the last), and the loss gets the last
    dict           model(**batch), and the loss gets the whole dict
    tensor         model(batch), and the loss gets the batch itself

A loss with a parameter named ``batch`` gets the whole batch, of whatever type.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.engine.compute.loss_divisor import ZERO_AT_NONE, Means, Seen, refuse, refuse_part
from paceline.exchange.flow.metric_tensors import add_tensors
from paceline.messages import Vote
from paceline.registry import BASELINE, PROCESSES, THREADS
from paceline.transport import checksum


def call(model: torch.nn.Module, batch: Any) -> Any:
    """The model's output."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return model(*batch[:-1])
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


@lru_cache(maxsize=64)
def whole(function: Callable[..., Any]) -> bool:
    """Whether a loss or metric has a parameter ``batch``, for the whole batch."""
    try:
        called = function.forward if isinstance(function, torch.nn.Module) else function
        return "batch" in inspect.signature(called).parameters
    except (TypeError, ValueError):
        return False


def target(function: Callable[..., Any], batch: Any) -> Any:
    """The argument of a loss or metric after the output."""
    return batch[-1] if isinstance(batch, tuple | list) and not whole(function) else batch


def leaves(batch: Any) -> list[Tensor]:
    """All tensors in it."""
    if isinstance(batch, Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [leaf for part in parts for leaf in leaves(part)]


def filled(batch: Any) -> Any:
    """The batch, or None where all of its tensors have no rows: a mean over no rows is NaN."""
    lengths = [len(leaf) for leaf in leaves(batch) if leaf.dim()]
    return None if lengths and not any(lengths) else batch


def count(batch: Any) -> int:
    """Its number of rows. Raises ValueError for a batch without tensors that have rows."""
    for leaf in leaves(batch):
        if leaf.dim():
            return len(leaf)
    raise ValueError(
        f"a batch must hold tensors with the samples first, got {type(batch).__name__}; let the dataset return "
        f"tensors, or give its DataLoader a collate_fn that does"
    )


def cut(batch: Any, start: int, stop: int, rows: int, change: Callable[[Tensor], Tensor] = lambda part: part) -> Any:
    """Rows ``start`` to ``stop`` of ``rows``: of tensors, and of lists of other values, such as strings."""

    def lists(part: Any) -> Any:
        listed = isinstance(part, list) or all(isinstance(each, str | bytes) for each in part)
        return part[start:stop] if listed and len(part) == rows else part

    return mapped(batch, lambda leaf: change(leaf[start:stop]) if leaf.dim() and len(leaf) == rows else leaf, lists)


def mapped(batch: Any, change: Callable[[Tensor], Any], lists: Callable[[Any], Any] | None = None) -> Any:
    """The same nesting, with ``change`` applied to tensors, and ``lists`` to lists and tuples without tensors."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, change, lists) for key, value in batch.items()}
    if lists and isinstance(batch, tuple | list) and batch and not leaves(batch):
        return lists(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(part, change, lists) for part in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(mapped(part, change, lists) for part in batch)
    return batch


def samples(batch: Any, dealt: int | None) -> int:
    """Its number of samples. ``dealt``: how many were read, if known: a collate_fn may have left some out, and samples
    need not lie along the first dimension (time, the nodes of a graph)."""
    rows = count(batch)
    if dealt is None or dealt == rows:
        return rows
    shapes = [leaf.shape for leaf in leaves(batch) if leaf.dim()]
    somewhere = any(dealt in shape for shape in shapes) or _has_list(batch, dealt)
    unlike = len({shape[0] for shape in shapes}) > 1
    return dealt if (unlike and somewhere) or all(dealt in shape for shape in shapes) else rows


def _has_list(batch: Any, length: int) -> bool:
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return any((isinstance(part, list) and len(part) == length) or _has_list(part, length) for part in parts)


def divisible(batch: Any, dealt: int | None) -> int:
    """Its number of rows. Raises ValueError where rows are not samples."""
    rows, known = count(batch), samples(batch, dealt)
    if rows != known:
        raise ValueError(
            f"a batch of {known} samples has {rows} rows in its first tensor: where samples do not lie along the first "
            f"dimension they cannot be divided further; use accumulate=1 and engine {BASELINE!r}, '{THREADS}:k' or "
            f"'{PROCESSES}:k', or let collate_fn put the samples first"
        )
    return rows


def split(batch: Any, parts: int, least: int = 1) -> list[Any]:
    """The batch in at most ``parts`` contiguous parts of nearly equal rows, each of ``least`` or more if possible."""
    rows = count(batch)
    parts = max(1, min(parts, rows // least))
    if parts == 1:
        return [batch]
    edges = [rows * i // parts for i in range(parts + 1)]
    return [cut(batch, start, stop, rows) for start, stop in pairwise(edges)]


def on_gpu(tensor: Tensor) -> bool:
    """Whether operations on it are asynchronous."""
    return tensor.is_cuda


class Awaited:
    """A number as it is now, times a factor: 0 where the factor is 0, whatever the number. `float` waits for the GPU
    that computes it, and for nothing after it."""

    def __init__(self, value: Tensor, times: Awaited | float = 1.0):
        self._times, self._copied = times, None
        if on_gpu(value):
            self._number: Tensor | float = value.detach().to("cpu", non_blocking=True, copy=True)
            self._copied = torch.cuda.current_stream(value.device).record_event() if value.is_cuda else None
        else:
            self._number = float(value.detach())

    def __float__(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        times = float(self._times)
        return float(self._number) * times if times else 0.0


def awaited(number: Tensor | float) -> Awaited | float:
    return Awaited(number) if isinstance(number, Tensor) else number


Judged = tuple[Tensor, Tensor | float, Tensor | float, dict[str, Awaited]]


def judged(
    loss: Callable[..., Any] | None, output: Any, batch: Any, means: Means | None = None
) -> tuple[Tensor, float, float, dict[str, Awaited]]:
    """As `judged_later`, waiting for the numbers."""
    value, times, weight, terms = judged_later(loss, output, batch, means=means)
    if isinstance(times, Tensor) and not times:
        value = value.nan_to_num(0.0)
    return value, float(times), float(weight), terms


def judged_later(
    loss: Callable[..., Any] | None,
    output: Any,
    batch: Any,
    rows: int | None = None,
    means: Means | None = None,
    divided: bool = False,
) -> Judged:
    """(loss, the factor that turns it into a sum, the weight of that sum, each named loss component as a sum).

    ``loss`` returns a mean over rows, a (sum, weight), or a dict of means. None: the output's own ``loss``, whose
    divisor ``means`` has recorded. ``rows``: their number, where the tensors do not show it.
    ``divided``: the batch is a part of the step's rows, so a loss that cannot be added up over parts is a ValueError.
    Factor and weight are tensors where a GPU still computes them.
    """
    if loss is None:
        result, means = _own_loss(output), means or Means()
    else:
        means = Means()
        with Seen(means):
            result = loss(output, target(loss, batch))
    if isinstance(result, tuple) and len(result) == 2 and _is_number(result[0]) and _is_weight(result[1]):
        return result[0], 1.0, float(result[1]), {}
    times = float(count(batch) if rows is None else rows)
    if _is_number(result):
        call, divisor = means.of(result), means.divisor(result)
        if divided:
            refuse(loss, call, means, batch, times)
        if call is None or divisor is None:
            return result, times, times, {}
        if isinstance(divisor, Tensor) and call.function in ZERO_AT_NONE and _is_late(divisor):
            divisor = divisor.double()  # a factor in float32 would be rounded twice
            return result, divisor, divisor, {}
        divisor = float(divisor)
        return (result, divisor, divisor, {}) if divisor else (call.nothing, 1.0, 0.0, {})
    if isinstance(result, Mapping) and result and all(map(_is_number, result.values())):
        if len(result) > Vote.MAX_TERMS:
            raise ValueError(
                f"the loss returned {len(result)} parts, at most {Vote.MAX_TERMS} are added up over all processes; "
                f"add some of them together"
            )
        for name, part in result.items() if divided else ():
            refuse_part(str(name), means.of(part), times)
        terms = {str(name): Awaited(part, times) for name, part in result.items()}
        return reduce(operator.add, result.values()), times, times, terms
    raise ValueError(
        f"the loss returned {_described(result)}; return one number as a tensor (the mean over rows), a pair (sum, "
        f"weight) with a finite weight >= 0, or a dict of means by name"
    )


def counted(found: Any, batch: Any, rows: int | None = None) -> dict[str, tuple[float, float]]:
    """A metric's result as (sum, weight) by name. It returns a sum over rows, a (sum, weight), or a dict of these."""
    try:
        whole = count(batch) if rows is None else rows
        return {
            str(name): (float(part[0]), float(part[1])) if isinstance(part, tuple) else (float(part), whole)
            for name, part in (found.items() if isinstance(found, Mapping) else [("", found)])
        }
    except (TypeError, ValueError, IndexError, RuntimeError):
        raise ValueError(
            f"the metric returned {_described(found)}; return a sum over rows, a pair (sum, weight), or a dict of these"
        ) from None


def is_tensor_sum(part: Any) -> bool:
    """Whether a metric's value is a (tensor, None), such as a confusion matrix: a sum that is not divided."""
    return isinstance(part, tuple) and len(part) == 2 and part[1] is None


class Measured:
    """What a metric returns of several batches, added up by name. ``tensors``: of each (tensor, None)."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.tensors: dict[str, Tensor] = {}
        self._awaited: list[tuple[Any, int]] = []
        self._total = 0.0

    def put(self, found: Any, batch: Any, rows: int | None) -> None:
        """As `add`; numbers on a GPU are added at `total`."""
        found = self._without_tensors(found)
        if not any(map(on_gpu, leaves(found))):
            self._total += self.add(found, batch, rows)
            return

        def number(part: Tensor) -> Any:
            return Awaited(part) if part.numel() == 1 and not part.is_complex() else part

        self._awaited.append((mapped(found, number), count(batch) if rows is None else rows))

    def total(self) -> float:
        """The sum of a metric without names, of what was put."""
        for found, rows in self._awaited:
            self._total += self.add(found, None, rows)
        self._awaited = []
        return self._total

    def add(self, found: Any, batch: Any, rows: int | None) -> float:
        """Returns the sum of a metric without names."""
        sums = counted(self._without_tensors(found), batch, rows)
        self.add_sums(sums)
        return sums.get("", (0.0, 0.0))[0]

    def _without_tensors(self, found: Any) -> Any:
        """The rest of a metric's result, once its tensors are added up."""
        named = found if isinstance(found, Mapping) else {"": found}
        tensors = {name: torch.as_tensor(part[0]) for name, part in named.items() if is_tensor_sum(part)}
        add_tensors(self.tensors, {str(name): part for name, part in tensors.items()})
        return {name: part for name, part in named.items() if name not in tensors} if tensors else found

    def add_sums(self, sums: Mapping[str, tuple[float, float]]) -> None:
        for name, (total, weight) in sums.items():
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = before[0] + total, before[1] + weight

    def after(self, terms: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[str, ...], str]:
        """(a vote's terms with the sum and weight of each value and a checksum of the names, the names, and why there
        are none)."""
        names, why = tuple(sorted(self.sums)), ""
        if len(terms) + 2 * len(names) + 2 > Vote.MAX_TERMS:
            why = (
                f"the metric has {len(names)} values and the loss {len(terms)} parts; a step adds up at most "
                f"{Vote.MAX_TERMS} numbers over all processes, so pace.metric has none; pace.evaluate has them all"
            )
        if not names or why:
            return terms, (), why
        sums = itertools.chain.from_iterable(self.sums[name] for name in names)
        return (*terms, *sums, checksum(names), 1.0), names, why


def _is_late(tensor: Tensor) -> bool:
    """Whether `float` of it waits for a GPU."""
    return on_gpu(tensor) and not torch.is_anomaly_enabled()


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _is_weight(value: Any) -> bool:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    return isinstance(value, int | float) and 0 <= value < math.inf


def _described(value: Any) -> str:
    if isinstance(value, Awaited):
        return "a number"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_described(part)}" for name, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_described, value)) + ")"
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"


def _own_loss(output: Any) -> Any:
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if own is None:
        raise ValueError(
            f"join(loss=None) takes the loss from the model's output, but {type(output).__name__} has none; put the "
            f"labels into the batch, or give a loss(output, batch)"
        )
    return own
