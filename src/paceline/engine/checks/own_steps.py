"""Check for optimizer steps of the script itself, which are an error beside a training step."""

from __future__ import annotations

from typing import Any

import torch


class OwnSteps:
    """Counts such steps until `refuse`; each later one raises RuntimeError, and changes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.count, self.updates, self._refuses = 0, False, False
        self._hook: Any = optimizer.register_step_pre_hook(self)

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
        self._hook.remove()


def step(optimizer: torch.optim.Optimizer) -> None:
    """Runs the optimizer's step as an update, which is no step of the script."""
    seen = [hook for hook in optimizer._optimizer_step_pre_hooks.values() if isinstance(hook, OwnSteps)]
    for hook in seen:
        hook.updates = True
    try:
        optimizer.step()
    finally:
        for hook in seen:
            hook.updates = False


def hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user has step hooks, which may need the gradients."""
    others = [hook for hook in optimizer._optimizer_step_pre_hooks.values() if not isinstance(hook, OwnSteps)]
    return bool(others or optimizer._optimizer_step_post_hooks)
