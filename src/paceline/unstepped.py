"""Processes that joined, and then trained alone: the optimizer steps by itself, and `pace.step` is never called."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch


class Unstepped:
    """Counts an optimizer's steps until the first one here: those are the script's own."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.num_own = 0
        self._hook: Any = optimizer.register_step_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_own += 1

    def end(self) -> None:
        """The first step: from now on nothing is counted."""
        self._hook.remove()
        self.num_own = 0

    def words(self, num_processes: int) -> str:
        """What to say at the end; empty where nothing is wrong."""
        if not self.num_own:
            return ""
        return (
            f"joined, but never stepped: the optimizer made {self.num_own} steps of the script's own, and "
            f"{num_processes} processes each trained alone; call pace.step(batch), or pace.backward(loss) and "
            f"pace.update(), in place of loss.backward() and optimizer.step()"
        )


def note(what: str) -> None:
    """For the launcher, which looks when all have ended."""
    if folder := os.environ.get("PACELINE_NOTES"):
        with contextlib.suppress(OSError):
            (Path(folder) / what).touch()
