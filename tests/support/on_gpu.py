"""The CPU as a GPU: its numbers count as computed later, so that a step alone is read after the next has begun."""

from __future__ import annotations

import pytest

from device import DEVICE
from paceline.engine.compute import batch, optimizer_step


def pretend(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(optimizer_step, "takes_gradients", lambda model: True)
    if DEVICE.type == "cpu":
        patch.setattr(batch, "on_gpu", lambda tensor: True)
