"""Check that the options of the optimizer's groups (learning rate, momentum, decay) are equal on all processes.

Every vote has a checksum of them. Where checksums differ, all processes gather their values, once.
*Cost*: two microseconds per step for an optimizer of one group.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

OWN = ("params", "param_names", "foreach", "fused", "initial_lr")  # may differ by node, or belong to a scheduler
CLOSE = 1e-5  # relative: values that an optimizer or a schedule computes differ so much between CPU types
NAMES = {"lr": "the learning rate"}
MAX_NAMED = 3  # named in an error

Numbers = list[dict[str, Any]]  # of each group


class Options:
    """The options of this process. Options that differ between processes only by rounding are no longer compared."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        named = {name for group in optimizer.param_groups for name, value in group.items() if _counts(value)}
        self._names = tuple(sorted(named.difference(OWN)))
        self._computed: set[tuple[int, str]] = set()

    def checksum(self) -> int:
        if self._computed:
            return zlib.crc32(repr(self.numbers(known=True)).encode())
        names = self._names
        values = [group.get(name) for group in self._optimizer.param_groups for name in names]
        if any(isinstance(value, Tensor) for value in values):  # the repr of a tensor drops digits
            values = list(map(_plain, values))
        return zlib.crc32(repr(values).encode())

    def numbers(self, known: bool = False) -> Numbers:
        """``known``: without those that differ by rounding."""
        excluded = self._computed if known else ()
        return [
            {name: _plain(group[name]) for name in self._names if name in group and (i, name) not in excluded}
            for i, group in enumerate(self._optimizer.param_groups)
        ]

    def compare(self, reported: Sequence[tuple[str, Numbers]]) -> str:
        """The differences as text; empty where they are rounding. ``reported``: (process, its values) of all."""
        (first, own), *others = reported
        faults = []
        for process, its in others:
            if len(its) != len(own):
                faults.append(f"the optimizer has {len(own)} groups on {first} and {len(its)} on {process}")
                continue
            for i, (group, other) in enumerate(zip(own, its, strict=True)):
                for name in [name for name in self._names if group.get(name) != other.get(name)]:
                    if _close(group.get(name), other.get(name)):
                        self._computed.add((i, name))
                        continue
                    option = f"{NAMES.get(name, name)} of group {i}"
                    faults.append(f"{option} is {group.get(name)} on {first} and {other.get(name)} on {process}")
        more = f", and {len(faults) - MAX_NAMED} more like it" if len(faults) > MAX_NAMED else ""
        return ", ".join(faults[:MAX_NAMED]) + more


def _counts(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_counts, value))
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    """The value in JSON types, the same on every process."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool):
        return value
    return float(value) if _counts(value) else str(value)


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= CLOSE * max(abs(one), abs(other))
    return bool(one == other)
