"""Divisors of torch's losses, observed where they are called: targets that count, class weights, elements.

Means over samples can be combined by numbers of samples. Other means cannot: if two processes have different numbers of
targets that count, the mean of their means differs from the mean over all. So the calls of losses are recorded. Where a
recorded call's result is the loss itself, the process contributes the sum with this call's own divisor.

    a loss given to join    a TorchFunctionMode records all torch calls in it
    a model's own loss      a tensor subclass for the labels alone records the losses that they reach, so that the
                            forward pass costs nothing; it is a plain tensor everywhere else

*Invariants*: any split of a batch gives the mean of one process; a part in which nothing counts adds 0, never NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

IGNORED = -100  # torch's default for a target that does not count
# the index of the targets among their arguments
CLASSES = {F.cross_entropy: 1, F.nll_loss: 1, getattr(F, "linear_cross_entropy", None): 2}
ZERO_AT_NONE = F.cross_entropy, F.nll_loss  # whose gradient is 0 where no target counts, though the mean is 0 / 0
ELEMENTS = {
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss, F.soft_margin_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
}
LABELS = "label", "target"  # in the names of tensors that a loss reads
INPUTS = "ids", "mask", "position"  # in the names of tensors that only a model reads, as in `transformers`

_active = threading.local()


@dataclass
class Call:
    """One call of a loss that returned one number."""

    function: Any
    value: Tensor
    version: int
    args: Sequence[Any]
    options: Mapping[str, Any]

    @property
    def reduction(self) -> str:
        legacy = self.options.get("size_average"), self.options.get("reduce")
        if legacy == (None, None):
            return str(self.options["reduction"])
        return str(_reduction.legacy_get_string(*legacy, emit_warning=False))

    @property
    def classes(self) -> Tensor | None:
        """Its targets, where they are classes."""
        if self.function not in CLASSES:
            return None
        target = self.args[CLASSES[self.function]].as_subclass(Tensor)
        return None if target.is_floating_point() or not target.dim() else target

    @property
    def counts(self) -> Tensor | None:
        target, ignored = self.classes, self.options.get("ignore_index")
        return None if target is None else target != (IGNORED if ignored is None else ignored)

    def divisor(self, elements: bool) -> Tensor | float | None:
        """The divisor of its mean; None: unknown here, so the number of samples. A tensor: a number of targets."""
        target, counts = self.classes, self.counts
        if self.reduction != "mean":
            return None
        if target is None or counts is None:
            shapes = [each.shape for each in self.args[:2] if isinstance(each, Tensor)]
            known = elements and self.function in ELEMENTS
            return float(torch.Size(torch.broadcast_shapes(*shapes)).numel()) if known else None  # type: ignore[no-untyped-call]
        weights = self.options.get("weight")
        if weights is None:
            return counts.sum()
        return float(weights[target.where(counts, 0)].where(counts, 0).sum())

    def alike(self, rows: float) -> bool:
        """Whether each of ``rows`` samples has the same share of its mean. Causal models ignore one target of each."""
        counts, many = self.counts, max(1, int(rows))
        if counts is None or self.reduction != "mean":
            return True
        if self.options.get("weight") is not None or counts.numel() % many:
            return False
        left_out = (~counts).reshape(many, -1).sum(1)
        return bool((left_out == left_out[0]).all()) and int(left_out[0]) <= 1

    @property
    def nothing(self) -> Tensor:
        """0 with a graph through the model: where nothing counts, the loss itself is 0 / 0."""
        logits: Tensor = self.args[0]
        return logits.flatten()[:1].sum() * 0.0


class Means:
    """The recorded calls of losses that returned one number. ``elements``: a mean over elements is divided by these."""

    def __init__(self, elements: bool = False):
        self.calls: list[Call] = []
        self.elements = elements

    def note(self, function: Any, value: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        if "reduction" in options and isinstance(value, Tensor) and not value.dim() and not value.is_inference():
            self.calls.append(Call(function, value, value._version, args, options))

    def of(self, loss: Any) -> Call | None:
        """The call that returned this tensor, if the tensor was not changed since."""
        found = (call for call in self.calls if call.value is loss and loss._version == call.version)
        return next(found, None)

    def divisor(self, loss: Any) -> Tensor | float | None:
        call = self.of(loss)
        return call.divisor(self.elements) if call else None


class Seen(TorchFunctionMode):
    """Within, every torch call is recorded."""

    def __init__(self, means: Means):
        super().__init__()
        self.means = means

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if kwargs:
            self.means.note(func, value, args, kwargs)
        return value


class Label(Tensor):
    """Records the losses that it reaches; so do tensors computed from labels alone, and integers computed with them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            value = func(*args, **(kwargs or {}))
        means: Means | None = getattr(_active, "means", None)
        if kwargs and means is not None:
            means.note(func, value, args, kwargs)
        given = [each for arg in args for each in (arg if isinstance(arg, tuple | list) else (arg,))]
        labels_only = all(isinstance(each, Label) for each in given if isinstance(each, Tensor))
        return _watched(value, labels_only)


def _watched(value: Any, labels_only: bool = False) -> Any:
    if isinstance(value, Tensor):
        integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        return value.as_subclass(Label) if labels_only or integer else value
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(_watched(each, labels_only) for each in value)
    return value


@contextmanager
def labels_of(batch: Any, means: Means, mapped: Callable[[Any, Callable[[Tensor], Tensor]], Any]) -> Iterator[Any]:
    """The batch for the model, with labels that record in ``means`` the losses that they reach."""
    _active.means = means
    try:
        if isinstance(batch, Mapping):
            yield {name: _label(str(name), part, mapped) for name, part in batch.items()}
        else:
            yield mapped(batch, _watched)
    finally:
        _active.means = None


def _label(name: str, part: Any, mapped: Callable[..., Any]) -> Any:
    named = any(word in name for word in LABELS)
    if not named and any(word in name for word in INPUTS):
        return part
    return mapped(part, lambda tensor: _watched(tensor, named))


def refuse(loss: Any, call: Call | None, means: Means, batch: Any, rows: float) -> None:
    """Raises ValueError for a loss that is not the combination of its values on parts of a batch."""
    if call is not None:
        if call.reduction == "sum":
            raise ValueError(
                f"the loss is a sum (reduction='sum' of {call.function.__name__}), and a step is a mean over the "
                f"global batch: use reduction='mean', and a learning rate as many times as large, or return "
                f"(sum, weight)"
            )
        return
    if loss is not None:
        return  # the function may have changed a mean in unknown ways
    unlike = any(not each.alike(rows) for each in means.calls) or _has_ignored(batch)
    if unlike:
        raise ValueError(
            "the model's own loss is no single mean over the labels that count, and here some do not (-100): each part "
            "of the batch would divide by another number. Give join a loss that returns (sum, weight), such as\n"
            "    loss=lambda output, batch: (F.cross_entropy(output.logits.flatten(0, -2), "
            "batch['labels'].flatten(), reduction='sum'),\n"
            "                                (batch['labels'] != -100).sum())"
        )


def refuse_part(name: str, call: Call | None, rows: float) -> None:
    """The same for one part of a loss in a dict, which must be a mean over samples."""
    if call is not None and (call.reduction == "sum" or not call.alike(rows)):
        what = "a sum" if call.reduction == "sum" else "a mean over the targets that count, or by weights of classes"
        raise ValueError(
            f"the loss's part {name!r} is {what}, and a dict holds means over samples: each part of the batch would "
            f"divide by another number; return (sum, weight) of all parts together, or means over samples"
        )


def _has_ignored(batch: Any) -> bool:
    labels = [part for name, part in batch.items() if "label" in str(name)] if isinstance(batch, Mapping) else []
    return any(isinstance(each, Tensor) and bool((each == IGNORED).any()) for each in labels)
