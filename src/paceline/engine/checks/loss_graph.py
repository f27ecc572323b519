"""Checks of a loss's autograd graph: the scale of a GradScaler, backward passes inside of backward (reentrant)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.errors import NoGradient

MAX_DEPTH = 6  # operations between a loss and its multiplication with the scale
REENTRANT = "CheckpointFunctionBackward"  # torch.utils.checkpoint with use_reentrant=True


def _nodes(loss: Tensor) -> Iterator[Any]:
    seen, stack = set[Any](), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack += [each for each, _ in node.next_functions]


def is_reentrant(loss: Tensor) -> bool:
    """Whether its backward runs other backward passes inside: a parameter may then get its gradient more than once."""
    return any(node.name() == REENTRANT for node in _nodes(loss))


def refuse_scaled(loss: Any) -> None:
    """Raises ValueError for a loss that a torch.amp.GradScaler has multiplied: its gradient would not be unscaled."""
    node, factors = getattr(loss, "grad_fn", None), list[Tensor]()
    for _ in range(MAX_DEPTH):
        if node is None:
            break
        factors += [each for each in (_saved(node, "_saved_other"), _saved(node, "_saved_self")) if each is not None]
        node = next((each for each, _ in node.next_functions if each is not None), None)
    for factor in factors:
        # a Python number is saved as a float64 tensor, a scale as a float32 one. Only then is the holder searched,
        # which takes 50 ms; gc.get_objects() instead would hold tuples that other threads are constructing
        maybe = not factor.dim() and not factor.requires_grad and factor.dtype is torch.float32
        if maybe and any(map(_is_scaler, gc.get_referrers(factor))):
            raise ValueError(
                "the loss was multiplied by a torch.amp.GradScaler, and its gradient would not be divided again: "
                "leave the scaler out; join(precision='fp16') scales the loss by itself, 'bf16' needs no scaling"
            )


def _is_scaler(holder: Any) -> bool:
    """Whether it is a GradScaler, or the dict of its attributes."""
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
