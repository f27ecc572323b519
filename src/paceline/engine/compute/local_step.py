"""How a process computes the gradient of its own rows: an engine's part that another engine can have inside.

"processes:2/pipeline:2" is engine `processes` with the local step of engine `pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.engine.compute.gradient_hooks import Backward

if TYPE_CHECKING:
    from paceline.engine.compute.forward_state import Moving
    from paceline.engine.compute.precision import Numerics


class LocalStep:
    """All rows at once, or one micro-batch after another. ``num_micros``: into which it divides each micro-batch.
    ``num_processes``: of this node, each with a local step of its own. ``devices``: those of the model's parts, in the
    order of its forward; empty where it lies on one."""

    num_micros = num_processes = 1
    devices: Sequence[torch.device] = ()

    def prepare(self, model: nn.Module, optimizer: Optimizer, numerics: Numerics) -> None:
        """Puts the model where it is computed. Raises ValueError for one that it cannot compute."""
        found = sorted({str(each.device) for each in model.parameters()})
        if len(found) > 1:
            raise ValueError(
                f"the model is on several devices ({', '.join(found)}); move it to one, or let a pipeline cut it "
                f"into stages with a device each"
            )

    def check_step(self, moving: Moving) -> None:
        """Called after each gradient, with what its forward passes changed. Raises ValueError."""

    def check_sync_norm(self) -> None:
        """Raises ValueError where batch norm cannot see all rows of a batch at once."""

    def hooked(self, model: nn.Module, numerics: Numerics, least_bytes: tuple[float, float]) -> Backward:
        return Backward(model, hook_layers=not numerics.compile, least_bytes=least_bytes)

    def found(self) -> str:
        """A message for the user from the last gradient."""
        return ""
