"""Wrapped models: wrappers that are bypassed, and models and optimizers that communicate by themselves and are refused.

`DistributedDataParallel` and `DataParallel` hold the user's module unchanged, so that module is trained. Their own
forward is bypassed meanwhile: it would broadcast buffers and start an all-reduce of its own in the next backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from paceline.engine.node.several_optimizers import members
from paceline.registry import REPLICAS

SERVED = (DistributedDataParallel, DataParallel)
# by the module that a class comes from, or the class itself: what it does
MODELS = {
    "torch.distributed.fsdp.": "divides parameters among processes (FSDP)",
    "torch.distributed._composable.": "adds up gradients by itself (fully_shard or replicate)",
    "torch.distributed.nn.": "lies in another process",
    "deepspeed.": "trains by DeepSpeed",
    "fairscale.nn.data_parallel.": "divides parameters or gradients among processes",
    "apex.parallel.distributed.": "adds up gradients by itself",
    "colossalai.": "trains by Colossal-AI",
}
OPTIMIZERS = {
    "horovod.": "adds up gradients by itself",
    "torch.distributed.optim.": "communicates by itself",
    "deepspeed.": "divides its state by itself",
    "fairscale.": "divides its state by itself",
    "colossalai.": "divides its state by itself",
    "apex.contrib.optimizers.distributed": "adds up gradients by itself",
}
PLAIN = "give join() the plain model and optimizer: paceline adds up gradients itself"


def inside(model: Any) -> Any:
    """The user's own module."""
    while isinstance(model, SERVED):
        model = model.module
    return model


def kinds(one: object) -> Iterator[str]:
    """The full names of its class and its base classes."""
    return (f"{kind.__module__}.{kind.__qualname__}" for kind in type(one).__mro__)


def _communicates(one: object, table: dict[str, str]) -> str:
    for kind in kinds(one):
        for start, what in table.items():
            if kind.startswith(start):
                return f"{kind.rpartition('.')[2]}, which {what}"
    return ""


def faults(model: nn.Module, optimizer: Any = None) -> list[str]:
    """The reasons why this model, with all its wrappers, or this optimizer cannot be trained here, one line each."""
    found = []
    for name, module in model.named_modules():
        where = f"layer {name!r}" if name else "the model"
        if what := _communicates(module, MODELS):
            found.append(f"{where} is a {what}; {PLAIN}")
            break
        if isinstance(module, DistributedDataParallel) and module.mixed_precision is not None:
            found.append(f"{where} is DistributedDataParallel with mixed_precision; use join(precision='bf16') instead")
        if isinstance(module, DataParallel) and len(module.device_ids) > 1 and name:
            found.append(f"{where} is DataParallel over {len(module.device_ids)} devices; use engine '{REPLICAS}:k'")
    parameters = list(model.named_parameters())
    sharded = [name for name, each in parameters if any(kind.endswith(".DTensor") for kind in kinds(each))]
    if sharded:
        found.append(
            f"parameter {sharded[0]!r} is a DTensor (fully_shard or tensor parallelism), of which each process holds a "
            f"part; {PLAIN}, and keeps whole replicas"
        )
    if early := [name for name, each in parameters if hasattr(each, "_in_backward_optimizers")]:
        found.append(
            f"parameter {early[0]!r} is updated inside backward (_apply_optimizer_in_backward), before gradients are "
            f"added up; leave that out"
        )
    for each in members(optimizer) if optimizer is not None else ():
        if what := _communicates(each, OPTIMIZERS):
            found.append(f"the optimizer is a {what}; {PLAIN}")
    return found


class Wrappers:
    """The wrappers around and inside of a model, bypassed until `restore`."""

    def __init__(self, model: nn.Module):
        self.found = [module for module in model.modules() if isinstance(module, SERVED)]
        self._own = [module.__dict__.get("forward") for module in self.found]
        self._hook = _watch(inside(model))
        for module in self.found:
            # a bound method, so that a copy of the wrapper calls its own module
            module.__dict__["forward"] = MethodType(_through, module)
            reset = getattr(getattr(module, "reducer", None), "_reset_state", None)
            if reset:
                reset()  # after a forward pass before join() the reducer expects a backward pass

    @property
    def notice(self) -> str:
        """One line for the user; empty without wrappers."""
        if not self.found:
            return ""
        kind = type(self.found[0]).__name__
        hooks = any(getattr(module, "_comm_hooks", ()) for module in self.found)
        unused = "; its communication hook is not used, see join(codec=)" if hooks else ""
        return f"the model is wrapped in {kind}: paceline trains the module inside, and does the all-reduce{unused}"

    def refuse_own_loop(self) -> None:
        """Raises ValueError where the user's own loop may call the wrapper."""
        if self.found:
            raise ValueError(
                f"in a loop of your own (pace.backward) the model must not be wrapped, and it is wrapped in "
                f"{type(self.found[0]).__name__}; give join() the module inside, model.module, and call that, or use "
                f"pace.step"
            )

    def restore(self) -> None:
        for module, own in zip(self.found, self._own, strict=True):
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own
        self.found = []
        if self._hook:
            self._hook.remove()


def _through(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.module(*args, **kwargs)


def _watch(model: nn.Module) -> Any:
    """A hook that raises where the model is trained through a wrapper that join() did not get; None without DDP."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None

    def check(_module: nn.Module, _inputs: Any) -> None:
        active: Any = DistributedDataParallel._active_ddp_module
        if active is not None and torch.is_grad_enabled() and active.require_backward_grad_sync:
            raise ValueError(
                "the model was called through DistributedDataParallel, which adds up gradients by itself: call "
                "model.module, or give join() the wrapped model and use pace.step"
            )

    return model.register_forward_pre_hook(check)
