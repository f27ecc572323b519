"""A model that is in eval mode when it trains: what to say of it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

MEANS = "dropout is off and batch norm neither uses nor updates the statistics of its batches"


def asleep(model: nn.Module, step: int) -> str:
    """One line, or nothing where all is in training mode, or kept from it on purpose.

    On purpose are, inside of a model in training mode, modules without trainable parameters and batch norm by itself.
    """
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
    """The outermost that are in eval mode, train, and would compute something else in training mode."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if child.training:
            yield from _inside(child, path)
        elif not isinstance(child, _BatchNorm) and _changes(child) and any(p.requires_grad for p in child.parameters()):
            yield path, child


def _changes(module: nn.Module) -> bool:
    """Whether its mode matters."""
    return any(isinstance(each, _BatchNorm) or (isinstance(each, _DropoutNd) and each.p) for each in module.modules())
