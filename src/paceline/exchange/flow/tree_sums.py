"""Sums in a fixed order: by a binary tree over shares 0 to n, whichever rank has computed which part of it.

A span (low, high) of the tree is split at the largest power of two: (0, 6) into (0, 4) and (4, 6).
"""

from __future__ import annotations

from torch import Tensor

Span = tuple[int, int]


def _halves(low: int, high: int) -> tuple[Span, Span]:
    middle = low + (1 << ((high - low - 1).bit_length() - 1))
    return (low, middle), (middle, high)


def add_up(span: Span, sums: dict[Span, Tensor]) -> Tensor | None:
    """The sum over a span of the tree. It consumes the partial sums in ``sums``, and is made in their memory.

    None where a part is missing: then ``sums`` holds the present parts, added up as far as possible.
    """
    if span in sums:
        return sums.pop(span)
    if span[1] - span[0] < 2:
        return None
    halves = _halves(*span)
    left, right = (add_up(half, sums) for half in halves)
    if left is not None and right is not None:
        return left.add_(right)
    sums.update({half: part for half, part in zip(halves, (left, right), strict=True) if part is not None})
    return None


def spans(whole: Span, first: int, last: int) -> list[Span]:
    """The largest spans of the tree over ``whole`` within first to last, to which `add_up` reduces these shares."""
    if first <= whole[0] and whole[1] <= last:
        return [whole] if first < last else []
    if whole[1] <= first or last <= whole[0] or whole[1] - whole[0] < 2:
        return []
    left, right = _halves(*whole)
    return spans(left, first, last) + spans(right, first, last)
