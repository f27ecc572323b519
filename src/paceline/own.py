"""A step of the user's own shape: backward passes of theirs, added up, then agreed on like any other step."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from paceline.contract import Ballot


class OwnStep:
    """``batch`` has a weight: what backward divides by. ``rows``: how many of its rows are here, where known."""

    def __init__(self, batch: Any, rows: int | None):
        self.batch, self.rows, self.ballot = batch, rows, Ballot()
        self.begun, self.start = False, time.perf_counter()

    def add(self, loss: Any, rows: int | None, loss_scale: float) -> Tensor:
        """What to call backward on. ``loss``: a mean over ``rows``, or (sum, weight)."""
        rows = self.rows if rows is None else rows
        if isinstance(loss, tuple):
            total, weight = loss[0], float(loss[1])
        elif rows is None:
            raise ValueError(
                "backward() must know how many rows the mean is over: take them from pace.rows(batch), give rows=, or "
                "give the loss as (sum, weight)"
            )
        else:
            total, weight = loss * rows, float(rows)
        if self.begun and weight != self.ballot.weight:
            raise ValueError(
                f"backward() was given losses over {self.ballot.weight:g} and over {weight:g} in one step; all must "
                f"count the same rows: one (sum, weight) of them all is what can be divided once"
            )
        if not (isinstance(total, Tensor) and total.numel() == 1):
            shape = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
            raise ValueError(f"backward() takes one number (a mean over rows) or (sum, weight), got {shape}")
        self.begun = True
        self.ballot.weight = weight
        self.ballot.loss_sum += float(total.detach())
        self.ballot.finite = self.ballot.loss_sum - self.ballot.loss_sum == 0.0
        scaled: Tensor = total * (loss_scale / self.batch.weight)
        return scaled


class Spent:
    """A batch whose rows have already been used."""

    def __init__(self, batch: Any):
        for name in ("epoch", "step", "ends_epoch", "wait_s", "dealt", "held"):
            if hasattr(batch, name):
                setattr(self, name, getattr(batch, name))
        self.weight = batch.weight

    def share(self, seat: Any) -> None:
        return None
