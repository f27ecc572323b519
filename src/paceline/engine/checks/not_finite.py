"""Diagnosis of a non-finite step: the first layer or gradient that is NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.compute.batch import leaves

Losses = Callable[[], Iterator[Tensor]]


def where(model: nn.Module, parameters: Mapping[str, Tensor], batch: Any, losses: Losses, backward: bool) -> str:
    """``losses``: computes the losses of ``batch``, part by part. Empty if all values are finite, or no batch given."""
    found: list[str] = []

    def check(name: str, module: nn.Module, output: Any) -> None:
        if not found and not _finite(output):
            found.append(f"{name or 'the model'} ({type(module).__name__})")

    hooks = [
        module.register_forward_hook(lambda module, _, output, name=name: check(name, module, output))
        for name, module in model.named_modules()
    ]
    try:
        if batch is None:
            return ""
        with torch.no_grad():
            finite = all(bool(loss.isfinite()) for loss in losses())
        if finite:
            return _bad_gradient(parameters, losses) if backward else ""
    finally:
        for hook in hooks:
            hook.remove()
    if not _finite(batch):
        return "the input itself"
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            return f"parameter {name!r} itself"
    return f"the output of {found[0]}" if found else "the loss, of a finite output"


def _finite(batch: Any) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in leaves(batch) if leaf.is_floating_point())


def _bad_gradient(parameters: Mapping[str, Tensor], losses: Losses) -> str:
    """The first parameter in backward order whose gradient is not finite in this process."""
    for parameter in parameters.values():
        parameter.grad = None
    for loss in losses():
        loss.backward()  # type: ignore[no-untyped-call]
    grads = [(name, parameter.grad) for name, parameter in parameters.items()]
    first = next((name for name, grad in grads if grad is not None and not grad.isfinite().all()), "")
    for parameter in parameters.values():
        parameter.grad = None
    return f"the gradient of {first}" if first else ""
