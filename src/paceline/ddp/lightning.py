"""Lightning's ``strategy="paceline"``, for Trainer and Fabric: its DDP strategy with our DistributedDataParallel.

Lightning has no entry points for strategies. torch has them for backends, and calls `announce` when it is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from paceline.ddp import after_import, import_hook

REGISTRIES = {
    "lightning.pytorch.strategies": "StrategyRegistry",
    "lightning.fabric.strategies": "STRATEGY_REGISTRY",
    "pytorch_lightning.strategies": "StrategyRegistry",
    "lightning_fabric.strategies": "STRATEGY_REGISTRY",
}
NAME = "paceline"
OPTIONS = {NAME: {}, f"{NAME}_find_unused_parameters_true": {"find_unused_parameters": True}}
WRAPPERS = "_setup_model", "setup_module"  # the methods that make the wrapper, of Trainer's strategy and of Fabric's


def announce() -> None:
    for package in REGISTRIES:
        after_import.call(package, partial(_register, package))


def _register(package: str) -> None:
    """Of a version of Lightning that is made otherwise nothing: whoever imports it need not want our strategy."""
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        _register_in(package)


def _register_in(package: str) -> None:
    strategies = sys.modules[package]
    base = strategies.DDPStrategy
    methods = {name: _wrapping(base, name) for name in WRAPPERS if hasattr(base, name)}
    ours = type("PacelineStrategy", (base,), {**methods, "strategy_name": NAME, "__module__": __name__})
    registry = getattr(strategies, REGISTRIES[package])
    for name, options in OPTIONS.items():
        if name not in registry:
            registry.register(name, ours, description="DDP in fewer bytes", **options)


def _wrapping(base: type, name: str) -> Callable[..., Any]:
    def wrap(strategy: object, module: object) -> Any:
        off = os.environ.get(import_hook.VARIABLE) == import_hook.OFF
        with contextlib.nullcontext() if off else _our_class(base.__module__):
            return getattr(base, name)(strategy, module)

    return wrap


@contextlib.contextmanager
def _our_class(home: str) -> Iterator[None]:
    """In the place of torch's in a module of Lightning's, while that makes a wrapper."""
    from paceline.ddp.module import DistributedDataParallel

    module, name = sys.modules[home], DistributedDataParallel.__name__
    theirs = getattr(module, name)
    setattr(module, name, DistributedDataParallel)
    try:
        yield
    finally:
        setattr(module, name, theirs)
