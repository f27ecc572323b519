"""Networks by name: one of `models/`, or the user's own as package.module:function."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline import registry

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Network:
    """``build(num_classes)`` returns the model. ``input``: the shape of one image, or None for any shape."""

    name: str
    build: Callable[[int], nn.Module]
    input: tuple[int, ...] | None = None
    learning_rate: float = 0.01
    momentum: float = 0.9
    batch_size: int = 32
    epochs: int = 5


def network(name: str) -> Network:
    """Imports a user's module from the current folder or PYTHONPATH. Raises ValueError."""
    if ":" not in name:
        own = registry.module("models", name)
        return Network(name, own.build, own.INPUT, own.LEARNING_RATE, own.MOMENTUM, own.BATCH_SIZE, own.EPOCHS)
    module, _, function = name.partition(":")
    try:
        factory: Any = registry.attribute(module, function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"cannot get model {name!r}: {error}; accepted: package.module:function with a function of the number of "
            f"classes, importable in {os.getcwd()} or by PYTHONPATH; or one of {', '.join(registry.names('models'))}"
        ) from error
    if not callable(factory):
        raise ValueError(f"model {name!r} is a {type(factory).__name__}, not a function of the number of classes")

    def build(num_classes: int) -> nn.Module:
        from torch import nn

        model = factory(num_classes)
        if not isinstance(model, nn.Module):
            raise ValueError(f"model {name!r} gives a {type(model).__name__}; it must give a torch.nn.Module")
        return model

    return Network(name, build)
