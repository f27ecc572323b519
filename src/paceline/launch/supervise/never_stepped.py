"""Processes that joined, and then trained alone: the optimizer steps by itself, and `pace.step` is never called."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def words(num_own: int, num_processes: int) -> str:
    """What to say at the end, after so many steps of the script's own; empty where nothing is wrong."""
    if not num_own:
        return ""
    return (
        f"joined, but never stepped: the optimizer made {num_own} steps of the script's own, and "
        f"{num_processes} processes each trained alone; call pace.step(batch), or pace.backward(loss) and "
        f"pace.update(), in place of loss.backward() and optimizer.step()"
    )


def note(what: str) -> None:
    """For the launcher, which looks when all have ended."""
    if folder := os.environ.get("PACELINE_NOTES"):
        with contextlib.suppress(OSError):
            (Path(folder) / what).touch()
