"""Whether a step's update may happen while the next forward pass runs: what was asked, what stands against it."""

from __future__ import annotations

import os

import torch

from paceline.contract import Engine, Exchange
from paceline.engine.shares import splits
from paceline.job import Job

ACCEPTED = ("backward", "forward")


def given(asked: str | None) -> str:
    """``asked``: None: PACELINE_OVERLAP, else "backward". Raises ValueError."""
    said = os.environ.get("PACELINE_OVERLAP") or "backward" if asked is None else asked
    if said not in ACCEPTED:
        raise ValueError(f"join: overlap is one of {', '.join(ACCEPTED)}, got {said!r}")
    return said


def choose(asked: str | None, job: Job, row: str, engine: Engine, exchange: Exchange) -> str:
    """As `given`. Raises ValueError with every reason against "forward"."""
    chosen = given(asked)
    if chosen == "backward":
        return chosen
    numerics = getattr(engine, "numerics", None)
    against = []
    if not engine.ahead:
        against.append(f"engine {row!r} updates all at once: use sequential or threads:k")
    if getattr(numerics, "compile", False):
        against.append(f"row {row!r} compiles the model, which hides where it reads a weight: use one without compile")
    if any(_is_closed(module) for module in job.model.modules()):
        against.append("a scripted or compiled module hides where it reads a weight: use the module itself")
    if job.clip is not None:
        against.append(f"clip={job.clip:g} needs the norm of the whole gradient before any weight changes")
    if getattr(numerics, "precision", "fp32") == "fp16":
        against.append("fp16 scales the loss and may skip a step only when all of its gradient is there: use bf16")
    if chosen not in exchange.overlaps:
        against.append("the exchange has nothing that arrives later: use 'allreduce'")
    if not splits(job.optimizer):
        against.append(
            f"optimizer {type(job.optimizer).__name__} cannot update one weight after the other (hooks around its "
            f"step, or a step that counts): use one of torch.optim, without hooks"
        )
    if against:
        raise ValueError(f"join: overlap='forward' lets weights change one by one, and {'; '.join(against)}")
    return chosen


def _is_closed(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
