"""Is the result the same? One run keeps its first and last weights and losses; another starts from the first.

In float64, so that what differs is the mathematics and not the rounding; with dropout off, since the
masks of N processes cannot be those of one.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


JOINS = itertools.count()  # of this process
FIRST, LAST, SAID = "first.safetensors", "last.safetensors", "said.json"


@dataclass
class Witness:
    """Made from PACELINE_VERIFY, a JSON object: folder, steps, dtype, and start (a folder) or none.

    A script that joins several times has as many, in folders of their own; the first to take its steps ends the run.
    """

    folder: Path
    steps: int
    dtype: str
    start: str = ""
    losses: list[float] = field(default_factory=list)
    batch_norm: bool = False

    @classmethod
    def of_environment(cls) -> Witness | None:
        text = os.environ.get("PACELINE_VERIFY")
        if not text:
            return None
        said, join = json.loads(text), f"join{next(JOINS)}"
        start = said.get("start", "") and os.path.join(said["start"], join, FIRST)
        return cls(Path(said["folder"]) / join, said["steps"], said["dtype"], start)

    def prepare(self, model: nn.Module) -> None:
        model.to(getattr(torch, self.dtype))
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            if isinstance(getattr(module, "dropout", None), float):
                module.__dict__["dropout"] = 0.0  # attention and recurrent layers keep theirs as a number
            self.batch_norm = self.batch_norm or isinstance(module, nn.modules.batchnorm._BatchNorm)
        if self.start:
            model.load_state_dict(load_file(self.start))

    def begin(self, state: dict[str, Tensor]) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # below /tmp, on a host
        self._save(state, FIRST)

    def cast(self, batch: Any, mapped: Callable[[Any, Callable[[Tensor], Tensor]], Any]) -> Any:
        """The batch with its floating-point tensors in the type of the comparison."""
        return _Cast(batch, getattr(torch, self.dtype), mapped)

    def cast_loss(self, loss: Any) -> Any:
        """The loss with its weights of classes in that type, whichever way it holds them."""
        dtype = getattr(torch, self.dtype)
        if isinstance(loss, nn.Module):
            return loss.to(dtype)
        if isinstance(loss, partial):
            words = {name: _cast(value, dtype) for name, value in loss.keywords.items()}
            return partial(self.cast_loss(loss.func), *(_cast(value, dtype) for value in loss.args), **words)
        self.cast_loss(getattr(loss, "__self__", None))  # of a bound method
        return loss

    def step(self, loss: float, state: dict[str, Tensor] | None) -> None:
        """Raises SystemExit after the last step, on every process."""
        self.losses.append(loss)
        if len(self.losses) < self.steps:
            return
        if state is not None:
            said = {"losses": self.losses, "batch_norm": self.batch_norm}
            (self.folder / SAID).write_text(json.dumps(said))
            self._save(state, LAST)
        raise SystemExit(0)

    def _save(self, state: dict[str, Tensor], name: str) -> None:
        # tied weights share storage, which safetensors refuses
        save_file({key: value.detach().clone() for key, value in state.items()}, self.folder / name)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


class _Cast:
    """A batch whose floating-point tensors arrive in another type."""

    def __init__(self, batch: Any, dtype: torch.dtype, mapped: Callable[..., Any]):
        self.batch, self.dtype, self.mapped, self.weight = batch, dtype, mapped, batch.weight

    @property
    def held(self) -> int | None:
        return getattr(self.batch, "held", None)

    def share(self, seat: Any) -> Any:
        rows = self.batch.share(seat)
        return None if rows is None else self.mapped(rows, lambda tensor: _cast(tensor, self.dtype))


@dataclass(frozen=True)
class Comparison:
    """The largest difference of a loss, and of a parameter relative to its norm; where; and whether it is too large."""

    steps: int
    loss: float
    weight: float
    worst: str
    tolerance: float
    batch_norm: bool  # its statistics are each process's own: N processes are not one

    @property
    def same(self) -> bool:
        return self.loss <= self.tolerance and self.weight <= self.tolerance


def ended(folder: Path) -> list[str]:
    """The joins that took all their steps in the run that was told this folder."""
    return sorted(path.parent.name for path in folder.glob(f"join*/{LAST}"))


def compare(one: Path, other: Path, dtype: str) -> Comparison:
    """The folders that two runs were told. Raises ValueError where they cannot be compared, or no weight moved."""
    join, *others = ended(one)
    if others:
        raise ValueError(
            f"verify: {', '.join([join, *others])} all took their steps, since the script went on after the SystemExit "
            f"that ends it; let that through: catch Exception, and neither BaseException nor SystemExit"
        )
    if ended(other) != [join]:
        raise ValueError(f"verify: {join} took its steps first on all nodes, {', '.join(ended(other))} in one process")
    one, other = one / join, other / join
    a, b = (json.loads((folder / SAID).read_text()) for folder in (one, other))
    pairs = list(zip(a["losses"], b["losses"], strict=True))
    loss = max(abs(x - y) / max(1e-30, abs(y)) for x, y in pairs)
    first, second = (load_file(folder / LAST) for folder in (one, other))
    begin = load_file(one / FIRST)
    gaps = {}
    moved = False
    for name, want in second.items():
        if want.is_floating_point():
            gaps[name] = float((first[name] - want).norm() / want.norm().clamp_min(1e-30))
            moved = moved or not torch.equal(want, begin[name])
    if not moved:
        raise ValueError("verify: no weight moved in these steps, so nothing was compared; is the learning rate 0?")
    worst = max(gaps, key=lambda name: gaps[name])
    return Comparison(len(pairs), loss, gaps[worst], worst, TOLERANCE[dtype], a["batch_norm"])
