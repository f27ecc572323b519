"""Check for optimizer steps of the script itself, which are an error beside a training step."""

from __future__ import annotations

from typing import Any

import torch

from paceline.engine.node.several_optimizers import members


class OwnSteps:
    """Counts such steps until `refuse`; each later one raises RuntimeError, and changes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.count, self.updates, self._refuses = 0, False, False
        self._hooks = [each.register_step_pre_hook(self) for each in members(optimizer)]

    def __call__(self, *_: Any) -> None:
        if self.updates:
            return
        if self._refuses:
            raise RuntimeError(
                "optimizer.step() was called beside pace.step (or pace.update), which has made that step already: it "
                "would change the weights twice, in each process by itself. Leave it out; after pace.close() the "
                "script may call it again"
            )
        self.count += 1

    def refuse(self) -> None:
        self._refuses, self.count = True, 0

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


def step(optimizer: torch.optim.Optimizer) -> None:
    """Runs the optimizer's step as an update, which is no step of the script."""
    seen = [hook for each in members(optimizer) for hook in _hooks(each) if isinstance(hook, OwnSteps)]
    for hook in seen:
        hook.updates = True
    try:
        optimizer.step()
    finally:
        for hook in seen:
            hook.updates = False


def hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user has step hooks, which may need the gradients."""
    return any(
        each._optimizer_step_post_hooks or not all(isinstance(hook, OwnSteps) for hook in _hooks(each))
        for each in members(optimizer)
    )


def _hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    return list(optimizer._optimizer_step_pre_hooks.values())
