"""What the user brings: model, loss, optimizer, global batch, seed, and how a step is to be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch

AS = {
    "loss": " as loss(output, target)",
    "metric": " as metric(output, target)",
    "forward": " as forward(model, batch)",
}


@dataclass
class Job:
    """``loss(output, target)`` is a mean over rows, (sum, weight) where rows do not count alike, or a dict of means.

    None takes the output's own ``loss``. ``batch_size`` is global: over all nodes. ``metric(output, target)`` is a
    sum over rows. ``most_rows``: of this node. ``found``: faults that were seen before. Raises ValueError, all at once.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[..., Any] | None
    batch_size: int
    clip: float | None = None
    seed: int = 0
    metric: Callable[..., Any] | None = None
    accumulate: int = 1
    precision: str | None = None
    scheduler: Any = None
    batch_norm: str = "local"
    forward: Callable[..., Any] | None = None
    shares: str | tuple[float, ...] = "measured"
    most_rows: int | None = None
    found: InitVar[Sequence[str]] = ()

    def __post_init__(self, found: Sequence[str]) -> None:
        model: Any = self.model  # what was given, whatever it was declared as
        optimizer: Any = self.optimizer
        faults = list(found)
        if not isinstance(model, torch.nn.Module):
            faults.append(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            faults.append(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            faults.append("LBFGS computes the loss several times per step, which a step here does not; use another")
        if isinstance(optimizer, torch.optim.SparseAdam):
            faults.append("SparseAdam takes sparse gradients alone, and here they are added up dense; use Adam")
        functions: tuple[tuple[str, Any], ...] = (
            ("loss", self.loss),
            ("metric", self.metric),
            ("forward", self.forward),
        )
        for name, function in functions:
            if function is not None and not callable(function):
                faults.append(f"{name} must be callable{AS[name]}, got {type(function).__name__}")
        counts: tuple[tuple[str, Any], ...] = (
            ("batch_size is the global batch,", self.batch_size),
            ("accumulate is", self.accumulate),
            ("most_rows is None or", 1 if self.most_rows is None else self.most_rows),
        )
        for name, count in counts:
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                faults.append(f"{name} an int >= 1, got {count!r}")
        if type(self.loss).__module__ == torch.nn.MSELoss.__module__ and getattr(self.loss, "reduction", "") == "sum":
            faults.append(
                "loss has reduction='sum', and a step is a mean over the global batch, whoever has how many of its "
                "rows: use reduction='mean', and a learning rate as many times as large"
            )
        if self.clip is not None and not (isinstance(self.clip, int | float) and self.clip > 0):
            faults.append(f"clip is a global norm > 0 or None, got {self.clip!r}")
        if self.precision not in (None, "fp32", "bf16", "fp16"):
            faults.append(f"precision is 'fp32', 'bf16', 'fp16' or None (the plan's), got {self.precision!r}")
        if self.batch_norm not in ("local", "sync"):
            faults.append(f"batch_norm is 'local' or 'sync', got {self.batch_norm!r}")
        if self.batch_norm == "sync" and self.accumulate != 1:
            faults.append("batch_norm='sync' is over the whole global batch, which accumulate > 1 never sees at once")
        faults += _schedule_faults(self.scheduler)
        if not faults:
            faults += self._parameter_faults()
        if faults:
            raise ValueError("join: " + "; ".join(faults))

    def check_divided(self) -> None:
        """Raises ValueError for what rows change by being looked at: each part of them would have other weights."""
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
                what = "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
                if module.max_norm is not None or module.scale_grad_by_freq:
                    raise ValueError(
                        f"join: layer {name!r} has {what}, which goes by the rows that a process, replica or "
                        f"micro-batch has before it; leave it out, or compute whole batches in one process: "
                        f"--plan sequential or threads:k, one node, accumulate=1"
                    )

    def check_norms(self) -> None:
        """Raises ValueError for layers that would normalise over each process's, or replica's, own samples unasked."""
        synced = [name for name, m in self.model.named_modules() if isinstance(m, torch.nn.SyncBatchNorm)]
        if synced and self.batch_norm == "local":
            raise ValueError(
                f"join: layer {synced[0]!r} is a SyncBatchNorm, which asks torch.distributed for all statistics, and "
                f"batch_norm='local' means each process's own: give batch_norm='sync', which covers it on any device, "
                f"or use torch.nn.BatchNorm"
            )

    def _parameter_faults(self) -> list[str]:
        if any(torch.nn.parameter.is_lazy(each) for each in (*self.model.parameters(), *self.model.buffers())):
            return [
                "the model has lazy layers, whose sizes the first batch shows: call it on a batch, under "
                "torch.no_grad(), before join() and before its optimizer is made"
            ]
        mine = {id(p) for p in self.model.parameters()}
        foreign = sum(id(p) not in mine for group in self.optimizer.param_groups for p in group["params"])
        of_loss = {id(p) for p in self.loss.parameters()} if isinstance(self.loss, torch.nn.Module) else set()
        if any(id(p) in of_loss - mine for group in self.optimizer.param_groups for p in group["params"]):
            return [
                "the optimizer holds parameters of the loss, which nobody would add up: make them the model's, as in "
                "model.criterion = loss before its optimizer is made"
            ]
        if foreign:
            return [f"the optimizer holds {foreign} parameters of another model; build it from this one"]
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if not sum(p.numel() for p in trainable):
            return ["the model has no trainable parameter"]
        devices = sorted({str(p.device) for p in self.model.parameters()})
        if len(devices) > 1:
            return [f"the model lies on several devices ({', '.join(devices)}); move it to one"]
        return []


def _schedule_faults(scheduler: Any) -> list[str]:
    if scheduler is None:
        return []
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return [
            "ReduceLROnPlateau needs a metric: do not pass it, call scheduler.step(pace.evaluate(...)) after each epoch"
        ]
    if not callable(getattr(scheduler, "step", None)) or not hasattr(scheduler, "state_dict"):
        return [f"scheduler must be a torch.optim.lr_scheduler, got {type(scheduler).__name__}"]
    return []
