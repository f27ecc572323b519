"""Tensors of all processes, for metrics that need more than sums: AUC, mAP, BLEU, confusion matrices."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.transport import Control, pack_frames, unpack_frames

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": operator.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


Numbers = float | Sequence[float]


def as_tensor(value: Tensor | Numbers, what: str) -> Tensor:
    """Python's floats in 64 bits, as they are. Raises TypeError."""
    if isinstance(value, Tensor):
        return value
    try:
        made = torch.as_tensor(value)
        own = hasattr(value, "dtype") or not made.is_floating_point()
        return made if own else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{what}() takes a tensor, a number or a list of numbers, got {type(value).__name__} {value!r:.60}; for "
            f"several values stack them into one tensor, or call it for each"
        ) from None


def each(control: Control, tensor: Tensor, what: str) -> list[Tensor]:
    """Every process's tensor, in the order of nodes and their processes. Raises ValueError, in all of them, where types
    or shapes after the first dimension differ."""
    found = list(map(unpacked, control.all_gather(packed(tensor))))
    kinds = {(one.dtype, one.shape[1:], one.dim()) for one in found}
    if len(kinds) > 1:
        shapes = ", ".join(f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in found)
        raise ValueError(
            f"{what}() was given {shapes}; give the same type, and the same shape after the first dimension"
        )
    return [one.to(tensor.device) for one in found]


def gather(control: Control, tensor: Tensor | Numbers) -> Tensor:
    """One after the other, along the first dimension, which may differ. A single number becomes one of a vector."""
    found = each(control, as_tensor(tensor, "gather"), "gather")
    return torch.cat([one.reshape(1) if one.dim() == 0 else one for one in found])


def all_reduce(control: Control, tensor: Tensor | Numbers, operation: str) -> Tensor:
    if operation not in OPERATIONS:
        raise ValueError(f"all_reduce() can compute {', '.join(OPERATIONS)}, got {operation!r}")
    found = each(control, as_tensor(tensor, "all_reduce"), "all_reduce")
    if len({one.shape for one in found}) > 1:
        raise ValueError(f"all_reduce() was given tensors of shapes {_shapes(found)}; give the same in every process")
    return functools.reduce(OPERATIONS[operation], found)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(each.shape)) for each in tensors)


def packed(tensor: Tensor) -> bytes:
    """Its type, shape and values."""
    own = tensor.detach().cpu().contiguous()
    head = json.dumps([str(own.dtype).removeprefix("torch."), list(own.shape)]).encode()
    return pack_frames([head, bytes(own.reshape(-1).view(torch.uint8).numpy())])


def unpacked(message: bytes) -> Tensor:
    head, data = unpack_frames(message)
    dtype, shape = json.loads(head)
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind).view(shape) if data else torch.empty(shape, dtype=kind)
