"""Layers that normalise over a batch, so that a sample's output depends on the other samples of the process.

Also the log line for a model that trains in eval mode.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

MEANS = "dropout is off and batch norm neither uses nor updates the statistics of its batches"


def over_batches(model: nn.Module) -> dict[str, nn.Module]:
    """By name: torch.nn's batch norm and its subclasses, and any other layer with a mean and a variance in buffers or
    frozen parameters."""
    return {name: module for name, module in model.named_modules() if _normalises(module)}


def _normalises(module: nn.Module) -> bool:
    if isinstance(module, _BatchNorm | _InstanceNorm):
        return isinstance(module, _BatchNorm)
    names = [name for name, each in module._parameters.items() if each is not None and not each.requires_grad]
    names += module._buffers
    return all(any(word in name for name in names) for word in ("mean", "var"))


def own_statistics(model: nn.Module) -> str:
    """One line about layers that normalise over each process's own samples; empty without such layers."""
    names = [name for name, module in over_batches(model).items() if module.training]
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"batch norm ({names[0]}{more}) takes the statistics of each process's, replica's or micro-batch's own "
        f"samples, as in DistributedDataParallel: the result depends on how many there are; join(batch_norm='sync') "
        f"takes those of the global batch"
    )


def in_eval_mode(model: nn.Module, step: int) -> str:
    """One line about modules in eval mode. Empty where there are none, or only those that are so on purpose: inside of
    a model in training mode, modules without trainable parameters, and batch norm by itself."""
    if not model.training:
        return (
            f"the model is in eval mode at step {step} (as from_pretrained() and evaluation leave it): {MEANS}; call "
            f"model.train() before, unless that is meant"
        )
    names = [f"{name} ({type(module).__name__})" for name, module in _inside(model, "")]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"the model is in training mode at step {step}, but inside of it {', '.join(names[:3])}{more} is in eval mode "
        f"(as from_pretrained() leaves it): {MEANS} there; call model.train() before, unless that is meant"
    )


def _inside(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules in eval mode that have trainable parameters and compute otherwise in training mode."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if child.training:
            yield from _inside(child, path)
        elif not isinstance(child, _BatchNorm) and _changes(child) and any(p.requires_grad for p in child.parameters()):
            yield path, child


def _changes(module: nn.Module) -> bool:
    """Whether training and eval mode differ for it."""
    return any(isinstance(each, _BatchNorm) or (isinstance(each, _DropoutNd) and each.p) for each in module.modules())
