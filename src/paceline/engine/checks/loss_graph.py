"""What the first graph of a loss shows: a GradScaler's scale, backward passes that run inside of backward."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.errors import NoGradient

DEEP = 6  # operations between a loss and the scale that it was multiplied by
REENTRANT = "CheckpointFunctionBackward"  # torch.utils.checkpoint with use_reentrant=True


def _nodes(loss: Tensor) -> Iterator[Any]:
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [each for each, _ in node.next_functions]


def is_reentrant(loss: Tensor) -> bool:
    """Whether its backward runs others inside, so that a parameter may get its gradient more than once."""
    return any(node.name() == REENTRANT for node in _nodes(loss))


def refuse_scaled(loss: Any) -> None:
    """Raises ValueError for a loss that a torch.amp.GradScaler has multiplied: nobody would divide by it again."""
    node, factors = getattr(loss, "grad_fn", None), list[Tensor]()
    for _ in range(DEEP):
        if node is None:
            break
        factors += [each for each in (_saved(node, "_saved_other"), _saved(node, "_saved_self")) if each is not None]
        node = next((each for each, _ in node.next_functions if each is not None), None)
    for factor in factors:
        # a number is a tensor of float64 here, a scale one of float32; gc.get_objects() would hold tuples that other
        # threads are about to make, and looking for the holder of a factor takes 50 ms
        maybe = not factor.dim() and not factor.requires_grad and factor.dtype is torch.float32
        if maybe and any(map(_is_scaler, gc.get_referrers(factor))):
            raise ValueError(
                "the loss was multiplied by a torch.amp.GradScaler, and its gradient would not be divided again: "
                "leave the scaler out; join(precision='fp16') scales the loss by itself, 'bf16' needs no scaling"
            )


def _is_scaler(holder: Any) -> bool:
    """Or what holds its attributes."""
    return type(holder).__name__ == "GradScaler" or (
        type(holder) is dict and {"_scale", "_growth_factor"} <= holder.keys()
    )


def _saved(node: Any, name: str) -> Tensor | None:
    try:
        value = getattr(node, name, None)
    except RuntimeError:  # freed already
        return None
    return value if isinstance(value, Tensor) else None


def without_gradient() -> NoGradient:
    error = NoGradient(
        "the loss does not require grad, and with batch_norm='sync' every process with rows takes part in backward: "
        "look for torch.no_grad(), .detach() and .item() before it; where nothing counts, return 0 * output.sum()"
    )
    error.reported = False  # type: ignore[attr-defined]
    return error
