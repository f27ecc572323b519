"""All values of a model's weights, cut into parts that are looked at, or sent, one per step."""

from __future__ import annotations

from collections.abc import Sequence

Part = list[tuple[int, int, int]]  # which tensor, from which of its values, to which


def cut(numels: Sequence[int], each: int, whole: bool = False) -> list[Part]:
    """Parts of ``each`` values, the last of what is left; ``whole``: no tensor is cut, and a part is at least as long.

    *Laws*: every value is in one part; the order is that of the tensors.
    """
    parts: list[Part] = []
    part: Part = []
    room = each
    for index, numel in enumerate(numels):
        start = 0
        while start < numel:
            stop = numel if whole else min(numel, start + room)
            part.append((index, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                parts.append(part)
                part, room = [], each
    return [*parts, part] if part else parts
