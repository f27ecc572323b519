"""The kind of mean that a loss is, found by computing it on the whole batch, on its parts, and on parts repeated twice.

Let g be the gradient at the outputs of all samples, and g_r that of part r alone. If g, restricted to r, is f_r g_r:

    f_r = n_r / n           a mean over samples
    f_r = 1                 a sum
    the f_r add up to 1     a mean over something else (tokens, class weights)
    otherwise               a function of a mean (its root), or a loss that depends on the batch size

If it is not a multiple of g_r, the loss compares samples, or weights them by the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from paceline.planner.diagnose.layers_in_parts import Part, cut, doubled
from paceline.planner.diagnose.saved_state import NEAR

Terms = Mapping[str, tuple[Tensor, float, float]]  # per term: (value, factor to a sum, weight of the sum)
LossTerms = Callable[[Any, Any], Terms]


def differentiable(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


@dataclass
class LossTerm:
    """One term of a loss. ``exact``: N processes give the same as one. ``factors``: f_r; ``shares``: n_r / n.

    residual    the relative distance of g from a multiple of g_r
    grows       the values for half a part and for a part, each repeated twice, relative to the values for them once
    others      whether the gradient at a sample depends on the outputs of other samples
    counts      the countable part of the batch in proportion to which the factors are, if any
    by_class    whether a sample's weight depends on its label only
    weighed     whether the loss returned (sum, weight)
    by_output   whether gradients are at the outputs, not at the parameters
    """

    term: str
    exact: bool
    factors: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    residual: float = 0.0
    grows: tuple[float, ...] = (1.0,)
    others: bool = False
    counts: str = ""
    by_class: bool = False
    weighed: bool = False
    by_output: bool = True


@dataclass
class Point:
    """A loss on some samples: its terms, and their gradients at the outputs or at the parameters."""

    terms: dict[str, tuple[float, float, float]]
    grads: dict[str, list[Tensor]]


class Fixed:
    """The loss alone, applied to the fixed outputs of the whole batch."""

    by_sample = True

    def __init__(self, loss_terms: LossTerms, output: Any, rows: Any):
        self.loss_terms, self.rows = loss_terms, rows
        self.output = tree_map_only(Tensor, Tensor.detach, output)

    def at(self, part: Part | None, twice: bool = False, others: Part | None = None) -> Point:
        output, rows, count = self.output, self.rows, 0
        if others:
            output = tree_map_only(Tensor, lambda leaf: _moved(leaf, others), output)
        if part:
            output, rows, count = cut(output, part), cut(rows, part), part.size
        if twice:
            output, rows = doubled(output, count), doubled(rows, count)
        output = tree_map_only(Tensor, _as_leaf, output)
        return _point(self.loss_terms(output, rows), differentiable(output))


class Recomputed:
    """A loss that the model computes. Gradients are at the outputs if it depends on them, else at ``weights``."""

    def __init__(self, compute: Callable[[Any], tuple[Any, Terms]], rows: Any, count: int, weights: list[nn.Parameter]):
        self.compute, self.rows, self.count, self.weights = compute, rows, count, weights
        output, terms = compute(rows)
        leaves = self._leaves(output)
        total = sum((value for value, _, _ in terms.values()), start=torch.zeros(()))
        found = torch.autograd.grad(total, leaves, allow_unused=True) if leaves and total.requires_grad else ()
        self.used = [place for place, grad in enumerate(found) if grad is not None and float(grad.abs().sum())]
        self.by_sample = bool(self.used)

    def _leaves(self, output: Any) -> list[Tensor]:
        return [leaf for leaf in differentiable(output) if leaf.numel() > 1]

    def at(self, part: Part | None, twice: bool = False, others: Part | None = None) -> Point:
        rows, count = self.rows, self.count
        if others:
            rows = tree_map_only(Tensor, lambda leaf: repeated(leaf, others), rows)
        if part:
            rows, count = cut(rows, part), part.size
        if twice:
            rows, count = doubled(rows, count), 2 * count
        output, terms = self.compute(rows)
        if not self.by_sample:
            return _point(terms, self.weights)
        leaves = self._leaves(output)
        return _point(terms, [leaves[place] for place in self.used])


Source = Fixed | Recomputed


def examine_terms(source: Source, parts: Sequence[Part], rows: Any) -> list[dict[str, Any]]:
    """A `LossTerm` per term, as JSON values. Raises any error that the loss raises on a part."""
    whole, points = source.at(None), [source.at(part) for part in parts]
    return [asdict(_term(source, term, parts, whole, points, rows)) for term in whole.terms]


def _term(source: Source, term: str, parts: Sequence[Part], whole: Point, points: list[Point], rows: Any) -> LossTerm:
    pairs = _pairs(source, parts, whole.grads[term], [point.grads[term] for point in points])
    factors, residual = _fit(pairs) if source.by_sample else _fit_all(whole.grads[term], points, term)
    shares = [part.size / part.count for part in parts]
    given = [point.terms[term] for point in points]
    value, times, weight = whole.terms[term]
    total = sum(each[2] for each in given)
    exact = total > 0 and weight > 0
    if exact:  # compares the sum over N processes, divided once, with one process
        of_all = sum(each[0] * each[1] for each in given) / total
        of_one = value * times / weight
        ratios = [times / weight / (each[1] / total) if each[1] else 1.0 for each in given]
        fits = [f is None or abs(f * ratio - 1) <= 10 * NEAR for f, ratio in zip(factors, ratios, strict=True)]
        close = abs(of_all - of_one) <= NEAR * max(abs(of_one), abs(of_all)) + 1e-12
        exact = close and residual <= 10 * NEAR and all(fits)
    result = LossTerm(term, exact, [f or 0.0 for f in factors], shares, residual, by_output=source.by_sample)
    result.weighed = times == 1.0 and weight != 1.0
    if not exact:
        _look_closer(result, source, parts, whole, rows)
    return result


def _look_closer(result: LossTerm, source: Source, parts: Sequence[Part], whole: Point, rows: Any) -> None:
    first = parts[0]
    half = Part(first.start, first.start + max(1, first.size // 2), first.count)
    result.grows = tuple(_growth(source, part, result.term) for part in (half, first))
    if source.by_sample:
        other = source.at(None, others=parts[0]).grads[result.term]
        pairs = _pairs(source, parts[:1], whole.grads[result.term], [[cut(leaf, parts[0]) for leaf in other]])
        result.others = _fit(pairs)[1] > 1e-4
    result.counts = counted(result.factors, parts, rows)
    result.by_class = source.by_sample and not result.counts and _by_class(source, result, parts, whole, rows)


def _growth(source: Source, part: Part, term: str) -> float:
    once, twice = (source.at(part, twice).terms[term][0] for twice in (False, True))
    return twice / once if once else 1.0


def counted(factors: Sequence[float], parts: Sequence[Part], rows: Any) -> str:
    """A count in proportion to ``factors``: of targets that are not ignored, or of ones in a mask; empty if none."""
    for number, leaf in enumerate(each for each in tree_iter(rows) if isinstance(each, Tensor)):
        if not leaf.dim() or len(leaf) % parts[0].count:
            continue
        for ignored in (-100, 0, -1, *([] if leaf.is_floating_point() or not leaf.numel() else [int(leaf.max())])):
            counts = [float((cut(leaf, part) != ignored).sum()) for part in parts]
            if not sum(counts) or len({round(c / part.size, 9) for c, part in zip(counts, parts, strict=True)}) < 2:
                continue
            if all(abs(count / sum(counts) - f) < 1e-5 for count, f in zip(counts, factors, strict=True)):
                return f"values of tensor {number} of the batch that are not {ignored}"
    return ""


def _by_class(source: Source, result: LossTerm, parts: Sequence[Part], whole: Point, rows: Any) -> bool:
    """Whether a sample's weight depends on its label only, and differs between labels."""
    count = parts[0].count
    if count > 64:
        return False
    labels = [leaf for leaf in tree_iter(rows) if isinstance(leaf, Tensor) and leaf.shape == (count,)]
    labels = [leaf for leaf in labels if not leaf.is_floating_point()]
    if not labels:
        return False
    ones = [Part(i, i + 1, count) for i in range(count)]
    pairs = _pairs(source, ones, whole.grads[result.term], [source.at(one).grads[result.term] for one in ones])
    weights, residual = _fit(pairs)
    if residual > 1e-4 or any(weight is None for weight in weights):
        return False
    of: dict[int, set[float]] = {}
    for label, weight in zip(labels[-1].tolist(), weights, strict=True):
        of.setdefault(label, set()).add(round(float(weight or 0) * count, 6))
    return all(len(each) == 1 for each in of.values()) and len({next(iter(each)) for each in of.values()}) > 1


def _pairs(
    source: Source, parts: Sequence[Part], whole: list[Tensor], points: Sequence[list[Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """For each part: (the whole batch's gradient at the part's outputs, the gradient of the part alone)."""
    both = zip(parts, points, strict=True) if source.by_sample else ()
    return [(_flat([cut(leaf, part) for leaf in whole]), _flat(point)) for part, point in both]


def _fit(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[float | None], float]:
    """(each part's factor, None without a gradient; the largest residual)."""
    factors, worst = list[float | None](), 0.0
    for whole, own in pairs:
        if whole.shape != own.shape:
            return [None] * len(pairs), 1.0
        size = float(own.norm())
        if size < 1e-14:
            factors.append(None)
            worst = max(worst, 1.0 if float(whole.norm()) > 1e-12 else 0.0)
            continue
        factor = float(whole @ own) / size**2
        factors.append(factor)
        worst = max(worst, float((whole - factor * own).norm() / whole.norm().clamp_min(1e-300)))
    return factors, worst


def _fit_all(whole: list[Tensor], points: Sequence[Point], term: str) -> tuple[list[float | None], float]:
    """(the factors by which the parts' parameter gradients best sum to the whole batch's; the residual)."""
    columns = torch.stack([_flat(point.grads[term]) for point in points], 1)
    target = _flat(whole)
    found = torch.linalg.lstsq(columns.double(), target.double()[:, None], driver="gelsd").solution[:, 0]
    difference = target - columns.double() @ found
    residual = float(difference.norm() / target.norm().clamp_min(1e-300))
    return [float(factor) for factor in found], residual


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([leaf.reshape(-1).double() for leaf in tensors]) if tensors else torch.zeros(0)


def _point(terms: Terms, leaves: Sequence[Tensor]) -> Point:
    numbers, grads = {}, {}
    for name, (value, times, weight) in terms.items():
        numbers[name] = float(value.detach()), float(times), float(weight)
        found: Sequence[Tensor | None] = (None,) * len(leaves)
        if value.requires_grad and leaves:
            found = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        grads[name] = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]
    return Point(numbers, grads)


def _as_leaf(leaf: Tensor) -> Tensor:
    return leaf.detach().requires_grad_() if leaf.is_floating_point() else leaf


def _moved(leaf: Tensor, part: Part) -> Tensor:
    """Outputs in which all samples but those of ``part`` are permuted and halved, with the same sign."""
    if not leaf.is_floating_point() or not leaf.dim() or len(leaf) % part.count:
        return leaf
    each = len(leaf) // part.count
    start, stop = part.start * each, part.stop * each
    others = torch.cat([leaf[:start], leaf[stop:]]).flip(0)
    others = 0.5 * (others.roll(1, -1) if leaf.dim() > 1 else others)
    return torch.cat([others[:start], leaf[start:stop], others[start:]])


def repeated(leaf: Tensor, part: Part) -> Tensor:
    """The samples of ``part`` in their places, and repeated in the places of all other samples."""
    if not leaf.dim() or not len(leaf) or len(leaf) % part.count:
        return leaf
    each = len(leaf) // part.count
    inside = range(part.start, part.stop)
    source = [i if i in inside else part.start + i % part.size for i in range(part.count)]
    return torch.cat([leaf[i * each : (i + 1) * each] for i in source])
