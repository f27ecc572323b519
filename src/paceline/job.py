"""What the user brings: model, loss, optimizer, global batch, seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Job:
    """``loss(output, target)`` is a mean over rows, or (sum, weight) where rows do not count alike.

    ``batch_size`` is global: over all nodes. ``metric(output, target)`` is a sum over rows.
    Raises ValueError, all faults at once.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[..., Any]
    batch_size: int
    clip: float | None = None
    seed: int = 0
    metric: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        model: Any = self.model  # what was given, whatever it was declared as
        optimizer: Any = self.optimizer
        loss: Any = self.loss
        faults = []
        if not isinstance(model, torch.nn.Module):
            faults.append(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            faults.append(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if not callable(loss):
            faults.append(f"loss must be callable as loss(output, target), got {type(loss).__name__}")
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            faults.append(f"batch_size is the global batch, an int >= 1, got {self.batch_size!r}")
        if self.clip is not None and not (isinstance(self.clip, int | float) and self.clip > 0):
            faults.append(f"clip is a global norm > 0 or None, got {self.clip!r}")
        if not faults:
            mine = {id(p) for p in self.model.parameters()}
            foreign = sum(id(p) not in mine for group in self.optimizer.param_groups for p in group["params"])
            if foreign:
                faults.append(f"the optimizer holds {foreign} parameters of another model; build it from this one")
            if not any(p.requires_grad for p in self.model.parameters()):
                faults.append("the model has no trainable parameter")
        if faults:
            raise ValueError("join: " + "; ".join(faults))
