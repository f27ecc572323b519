"""A model under diagnosis: its loss, a batch and its parts, and forward passes that start from one saved state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from paceline.planner.diagnose.layers_in_parts import Part
from paceline.planner.diagnose.loss_kind import LossTerms, Terms
from paceline.planner.diagnose.saved_state import SavedState

MAX_PARTS = 3
Sums = Mapping[str, tuple[float, float]]  # of a metric: (sum, weight) by name


@dataclass
class Subject:
    """``forward(rows)``: the model's output. ``loss_terms``: the terms of the loss; None in the user's own loop.

    ``own_loss``: the model computes the loss. ``read``: the parts as their processes read them, if known. ``seed``
    seeds every generator. ``loss``: the loss object, which may have state.
    """

    model: nn.Module
    forward: Callable[[Any], Any]
    loss_terms: LossTerms | None
    rows: Any
    parts: list[Part]
    seed: Callable[[int], None]
    own_loss: bool = False
    read: list[Any] = field(default_factory=list)
    metric: Callable[[Any, Any], Sums] | None = None
    loss: Any = None

    @property
    def count(self) -> int:
        return self.parts[0].count

    @property
    def whole(self) -> Part:
        return Part(0, self.count, self.count)

    def terms(self, output: Any, rows: Any) -> Terms:
        """The terms of the loss; empty in the user's own training loop."""
        return self.loss_terms(output, rows) if self.loss_terms else {}


class Pinned(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, random operators of torch return one constant, so that results do not depend on shapes.

    ``draws``: their number. ``narrow``: how often an operator turned float64 into float32, by the current place, which
    ``where`` returns. ``pins``: whether to replace random numbers, or only to count.
    """

    def __init__(self, where: Callable[[], str] = lambda: "", pins: bool = True):
        super().__init__()  # type: ignore[no-untyped-call]
        self.where, self.pins = where, pins
        self.draws = 0
        self.narrow: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        out = func(*args, **kwargs)
        if drawn and _draws(func, args, kwargs):
            self.draws += 1
            if self.pins and isinstance(out, Tensor):
                _pin(func, out)
        if isinstance(out, Tensor) and out.dtype == torch.float32 and _has_float64((args, kwargs)):
            where = self.where()
            self.narrow[where] = self.narrow.get(where, 0) + 1
        return out


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator with torch's random tag draws: attention kernels only do with dropout."""
    name = func._schema.name
    if "attention" in name:
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        return bool(given.get("dropout_p", 0.0))
    return True


def _has_float64(tree: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in tree_iter(tree))


def _pin(func: Any, out: Tensor) -> None:
    name = func._schema.name
    with torch.no_grad():
        if "randperm" in name:
            out.copy_(torch.arange(len(out), dtype=out.dtype))
        elif "bernoulli" in name:  # a mask without zeros
            out.fill_(1)
        elif "dropout" in name:
            return
        elif out.dtype == torch.bool:
            out.fill_(True)
        elif out.is_floating_point():
            out.fill_(0.5)
        else:
            out.fill_(int(out.min()) if out.numel() else 0)


class ForwardPasses:
    """Forward passes of a model, each from the same saved state."""

    def __init__(self, subject: Subject):
        self.subject, self.model = subject, subject.model
        self.saved = SavedState({"": subject.model, "loss.": subject.loss})
        self.grads = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        self.modules = dict(self.model.named_modules())
        self.norms: list[str] = []  # layers that normalise over a batch

    def restore(self) -> None:
        """Restores all state and seeds."""
        self.saved.restore()
        for parameter, grad in self.grads:
            parameter.grad = grad
        self.subject.seed(0)

    @contextlib.contextmanager
    def evaluating(self, names: Sequence[str]) -> Iterator[None]:
        """Within the context, these layers are in evaluation mode."""
        inside = [m for name in names for m in self.modules[name].modules() if m.training]
        for module in inside:
            module.training = False
        try:
            yield
        finally:
            for module in inside:
                module.training = True

    @contextlib.contextmanager
    def with_running_statistics(self) -> Iterator[None]:
        """Within the context, batch norm uses its running statistics, and random numbers are constant."""
        with self.evaluating(self.norms), Pinned():
            yield

    def run(self, rows: Any, seed: int = 0) -> Any:
        self.restore()
        self.subject.seed(seed)
        return self.subject.forward(rows)

    def passes(self, rows: Any, seed: int = 0, pins: bool = True) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad(), Pinned() if pins else contextlib.nullcontext():
                return self.run(rows, seed)

        return run

    def results(self, rows: Any, seed: int = 0) -> list[Any]:
        """The outputs and loss terms of a pass."""
        with torch.no_grad():
            output = self.run(rows, seed)
            terms = self.subject.terms(output, rows)
        leaves = [leaf.detach().clone() for leaf in tree_iter(output) if isinstance(leaf, Tensor)]
        return leaves + [value.detach().clone() for value, _, _ in terms.values()]


def parts_of(count: int, edges: Sequence[tuple[int, int]] = ()) -> list[Part]:
    """The processes' parts of a batch, merged into at most MAX_PARTS; for one process, two halves."""
    known = sorted({(start, stop) for start, stop in edges if start < stop})
    whole = known and known[0][0] == 0 and known[-1][1] == count
    if len(known) < 2 or not whole or any(a[1] != b[0] for a, b in pairwise(known)):
        known = [(0, count // 2), (count // 2, count)]
    groups = [known[len(known) * i // MAX_PARTS : len(known) * (i + 1) // MAX_PARTS] for i in range(MAX_PARTS)]
    return [Part(group[0][0], group[-1][1], count) for group in groups if group]
