"""Checks the arguments of `join`: model, loss, optimizer, global batch size, seed, and options of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from numbers import Integral
from typing import Any

import torch

from paceline.registry import ONE_PROCESS


@dataclass
class Job:
    """``loss(output, target)`` is a mean over samples, (sum, weight) where samples have weights, or a dict of means.

    None: the output's own ``loss``. ``batch_size`` is global: over all nodes. ``metric(output, target)`` is a sum over
    samples. ``most_rows``: of this node. ``found``: errors found before. Raises ValueError with all errors at once.
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
    buffers: str = "own"
    found: InitVar[Sequence[str]] = ()

    def __post_init__(self, found: Sequence[str]) -> None:
        model: Any = self.model  # may be of any type, whatever the annotation
        optimizer: Any = self.optimizer
        errors = list(found)
        is_module = isinstance(model, torch.nn.Module)
        if not is_module:
            errors.append(f"model must be a torch.nn.Module, got {_describe(model)}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            errors.append(f"optimizer must be a torch.optim.Optimizer or a list of these, got {_describe(optimizer)}")
        several = getattr(optimizer, "optimizers", None)  # `SeveralOptimizers` has a list
        kinds = {type(each) for each in (several if isinstance(several, list) else [optimizer])}
        if any(issubclass(kind, torch.optim.LBFGS) for kind in kinds):
            errors.append("LBFGS computes the loss several times per step, which is not supported; use another")
        if any(issubclass(kind, torch.optim.SparseAdam) for kind in kinds):
            errors.append("SparseAdam accepts only sparse gradients, and here they are added up dense; use Adam")
        errors += self._function_errors()
        errors += self._number_errors()
        schedules = getattr(self.scheduler, "schedulers", None)  # `SeveralSchedulers` has a list
        given = [] if self.scheduler is None else [self.scheduler]
        for each in schedules if isinstance(schedules, list) else given:
            errors += _schedule_errors(each, optimizer)
        if is_module:
            errors += _model_errors(model)
        if is_module and isinstance(optimizer, torch.optim.Optimizer):
            errors += self._parameter_errors()
        if errors:
            raise ValueError("join: " + "; ".join(errors))

    def _function_errors(self) -> list[str]:
        errors, pair = [], "output, target"
        functions = ("loss", pair, self.loss), ("metric", pair, self.metric), ("forward", "model, batch", self.forward)
        for name, given, function in functions:
            of_layers = isinstance(function, type) and issubclass(function, torch.nn.Module)
            if function is not None and (of_layers or not callable(function)):
                errors.append(f"{name} must be callable as {name}({given}), got {_describe(function)}")
        return errors + _loss_errors(self.loss)

    def _number_errors(self) -> list[str]:
        errors = []
        counts: tuple[tuple[str, Any], ...] = (
            ("batch_size is the global batch,", self.batch_size),
            ("accumulate is", self.accumulate),
            ("most_rows is None or", 1 if self.most_rows is None else self.most_rows),
        )
        for name, count in counts:
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                errors.append(f"{name} an int >= 1, got {count!r}")
        seed: Any = self.seed
        if isinstance(seed, bool) or not isinstance(seed, Integral):
            errors.append(f"seed is an int, got {seed!r}")
        if self.clip is not None and not (isinstance(self.clip, int | float) and self.clip > 0):
            errors.append(f"clip is a global norm > 0 or None, got {self.clip!r}")
        if self.precision not in (None, "fp32", "bf16", "fp16"):
            scales = "; 'fp16' scales the loss by itself" if isinstance(self.precision, torch.amp.GradScaler) else ""
            errors.append(f"precision is 'fp32', 'bf16', 'fp16' or None (the plan's), got {self.precision!r}{scales}")
        if self.batch_norm not in ("local", "sync"):
            errors.append(f"batch_norm is 'local' or 'sync', got {self.batch_norm!r}")
        if self.buffers not in ("own", "broadcast"):
            errors.append(f"buffers is 'own' or 'broadcast', got {self.buffers!r}")
        if self.batch_norm == "sync" and self.accumulate != 1:
            errors.append("batch_norm='sync' needs the whole global batch at once, but accumulate > 1 divides it")
        return errors

    def check_divided(self) -> None:
        """Raises ValueError for layers whose forward depends on which other samples a part of the batch has."""
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
                what = "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
                if module.max_norm is not None or module.scale_grad_by_freq:
                    raise ValueError(
                        f"join: layer {name!r} has {what}, which depends on all samples that a process, replica or "
                        f"micro-batch has; leave it out, or compute whole batches in one process: "
                        f"--plan {ONE_PROCESS}, one node, accumulate=1"
                    )

    def check_norms(self) -> None:
        """Raises ValueError for layers of SyncBatchNorm, which would here normalise over one process's samples."""
        synced = [name for name, m in self.model.named_modules() if isinstance(m, torch.nn.SyncBatchNorm)]
        if synced and self.batch_norm == "local":
            raise ValueError(
                f"join: layer {synced[0]!r} is a SyncBatchNorm, which needs torch.distributed for global statistics, "
                f"but batch_norm='local' means each process's own: give batch_norm='sync', which supports it on any "
                f"device, or use torch.nn.BatchNorm"
            )

    def _parameter_errors(self) -> list[str]:
        errors = []
        own_ids = {id(p) for p in self.model.parameters()}
        optimized = [p for group in self.optimizer.param_groups for p in group["params"]]
        of_loss = {id(p) for p in self.loss.parameters()} if isinstance(self.loss, torch.nn.Module) else set()
        if any(id(p) in of_loss - own_ids for p in optimized):
            errors.append(
                "the optimizer has parameters of the loss, whose gradients are not added up: make them the model's, as "
                "in model.criterion = loss before its optimizer is made"
            )
        if foreign := sum(id(p) not in own_ids | of_loss for p in optimized):
            errors.append(f"the optimizer holds {foreign} parameters of another model; build it from this one")
        return errors


def _describe(given: Any) -> str:
    """The type of an argument, for an error; for a class, that it must be instantiated."""
    if not isinstance(given, type):
        return type(given).__name__
    return f"the class {given.__name__} itself; instantiate it: {given.__name__}(...)"


def _model_errors(model: torch.nn.Module) -> list[str]:
    values = [*model.named_parameters(), *model.named_buffers()]
    errors = [
        f"{f'layer {name!r}' if name else 'the model'} is a torch.jit.ScriptModule, whose layers cannot have hooks: "
        f"give the module from which it was made; `+compile` after the engine's name compiles that"
        for name, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
    ][:1]
    if any(torch.nn.parameter.is_lazy(each) for _, each in values):
        errors.append(
            "the model has lazy layers, whose sizes the first batch determines: call it on a batch, under "
            "torch.no_grad(), before join() and before its optimizer is made"
        )
    if meta := [name for name, each in values if each.is_meta]:
        errors.append(
            f"{len(meta)} of the model's tensors, {meta[0]!r} the first, are on the meta device and have no values: "
            f"model.to_empty(device='cpu'), then fill or load them, before its optimizer is made"
        )
    for name, each in values:
        sparse = each.layout is torch.sparse_coo and not isinstance(each, torch.nn.Parameter)
        if not (each.layout is torch.strided or sparse) or each.is_quantized or each.is_nested:
            what = "parameter" if isinstance(each, torch.nn.Parameter) else "buffer"
            kind = "nested" if each.is_nested else "quantized" if each.is_quantized else str(each.layout)
            errors.append(f"{what} {name!r} is {kind}: make it dense; a buffer may also be sparse_coo")
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not any(torch.nn.parameter.is_lazy(p) or p.numel() for p in trainable):
        errors.append("the model has no trainable parameter")
    return errors


def _loss_errors(loss: Any) -> list[str]:
    """Errors of torch's own losses, given as modules, functions, partials or methods of these."""
    keywords: dict[str, Any] = {}
    while isinstance(loss, partial) or isinstance(getattr(loss, "__self__", None), torch.nn.Module):
        if isinstance(loss, partial):
            loss, keywords = loss.func, {**loss.keywords, **keywords}
        else:
            loss = loss.__self__
    if isinstance(loss, torch.nn.Module):
        is_torch = type(loss).forward.__module__ == torch.nn.MSELoss.__module__
        reduction = getattr(loss, "reduction", "mean") if is_torch else "mean"
    else:
        legacy = keywords.get("size_average"), keywords.get("reduce")
        is_torch = getattr(loss, "__module__", None) == torch.nn.functional.__name__
        reduction = keywords.get("reduction", "mean")
        if legacy != (None, None):
            reduction = torch.nn._reduction.legacy_get_string(*legacy, emit_warning=False)
    if is_torch and reduction == "sum":
        return [
            "loss has reduction='sum', and a step is a mean over the global batch, however it is divided: use "
            "reduction='mean', and a learning rate as many times as large"
        ]
    if is_torch and reduction == "none":
        return ["loss has reduction='none', which gives a number per sample; a step needs one: use reduction='mean'"]
    return []


def _schedule_errors(scheduler: Any, optimizer: Any) -> list[str]:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return [
            "ReduceLROnPlateau needs a metric: do not pass it, call scheduler.step(pace.evaluate(...)) after each epoch"
        ]
    if isinstance(scheduler, torch.amp.GradScaler):
        return ["scheduler is a GradScaler: leave it out, precision='fp16' scales the loss by itself"]
    steps = callable(getattr(scheduler, "step", None)) and hasattr(scheduler, "state_dict")
    if isinstance(scheduler, type | torch.optim.Optimizer) or not steps:
        return [f"scheduler must be a torch.optim.lr_scheduler, got {_describe(scheduler)}"]
    for each in _schedulers(scheduler, set()):
        other = getattr(each, "optimizer", None)
        if isinstance(other, torch.optim.Optimizer) and not _shares_groups(other, optimizer):
            return [
                f"the scheduler's {type(each).__name__} was made for another optimizer, whose learning rates it would "
                f"change: make it with the optimizer that join is given"
            ]
    return []


def _shares_groups(one: torch.optim.Optimizer, other: Any) -> bool:
    """Whether both have a parameter group in common: an optimizer may wrap another and have its groups."""
    own_ids = {id(group) for group in one.param_groups}
    return one is other or any(id(group) in own_ids for group in getattr(other, "param_groups", ()))


def _schedulers(scheduler: Any, seen: set[int]) -> Iterator[Any]:
    """The scheduler, and those of which it is composed."""
    seen.add(id(scheduler))
    yield scheduler
    for value in vars(scheduler).values() if hasattr(scheduler, "__dict__") else ():
        for each in value if isinstance(value, list | tuple) else (value,):
            if id(each) not in seen and isinstance(each, torch.optim.lr_scheduler.LRScheduler):
                yield from _schedulers(each, seen)
