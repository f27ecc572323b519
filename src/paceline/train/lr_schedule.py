"""Learning-rate schedule for a global batch: scaling (none, linear, sqrt), warm-up, decay.

A schedule is a factor on each group's own learning rate. It depends only on the number of applied steps, so it can be
resumed at any step.

*Source*: linear rule, gradual warm-up per step and step decay at 30, 60 and 80 of 90 epochs: Goyal et al.,
arXiv 1706.02677 (2017); cosine: Loshchilov and Hutter, arXiv 1608.03983 (2016), equation 5, without restarts;
polynomial of power 2: You, Gitman and Ginsburg, arXiv 1708.03888 (2017), for use with LARS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

RULES: dict[str, Callable[[float], float]] = {"none": lambda k: 1.0, "linear": lambda k: k, "sqrt": math.sqrt}
DECAYS = ("none", "cosine", "poly", "step")
NINTHS = (3, 6, 8)  # of all steps, where "step" divides by ten


def scaled(lr: float, batch_size: int, base_batch_size: int, rule: str = "linear") -> float:
    """The learning rate for ``batch_size`` samples per step, where ``lr`` was chosen for ``base_batch_size``.

    With k the ratio of the batch sizes: linear k lr, sqrt k^0.5 lr, none lr.
    """
    if rule not in RULES:
        raise ValueError(f"no learning-rate scaling named {rule!r}; known: {', '.join(RULES)}")
    if batch_size < 1 or base_batch_size < 1:
        raise ValueError(f"batch sizes must be at least 1, got {batch_size} for a base of {base_batch_size}")
    return lr * RULES[rule](batch_size / base_batch_size)


def factor(step: int, warmup_steps: int, decay: str, total_steps: int | None, start: float) -> float:
    """The factor on the learning rate after ``step`` applied steps; exactly 1 where the warm-up ends."""
    if step < warmup_steps:
        return start + (1 - start) * step / warmup_steps
    if total_steps is None or decay == "none":
        return 1.0
    if decay == "step":
        return 10.0 ** -sum(9 * step >= part * total_steps for part in NINTHS)
    remaining = max(0.0, (total_steps - step) / (total_steps - warmup_steps))
    return remaining**2 if decay == "poly" else math.sin(math.pi / 2 * remaining) ** 2


def make(
    optimizer: Optimizer,
    *,
    warmup_steps: int = 0,
    decay: str = "none",
    total_steps: int | None = None,
    start: float | None = None,
) -> LRScheduler | None:
    """The schedule, to be stepped once per applied step; None where the learning rate never changes.

    ``start`` is the fraction of the target at which warm-up begins: base batch size over batch size in Goyal's
    recipe; by default 1 / (warmup_steps + 1), equal increments from zero. Warm-up is a part of ``total_steps``.
    Raises ValueError with all errors at once.
    """
    errors = []
    if warmup_steps < 0:
        errors.append(f"warmup_steps must be at least 0, got {warmup_steps}")
    if start is not None and not 0 <= start <= 1:
        errors.append(f"start is a share of the target, between 0 and 1, got {start}")
    if decay not in DECAYS:
        errors.append(f"no decay named {decay!r}; known: {', '.join(DECAYS)}")
    elif decay != "none":
        parts = NINTHS[0] if decay == "step" else 9  # of all steps, before which warm-up must end
        if total_steps is None:
            errors.append(f"decay {decay!r} needs total_steps, the number of steps of the whole run")
        elif 9 * warmup_steps >= parts * total_steps:
            errors.append(
                f"warmup_steps={warmup_steps} leaves no room for decay {decay!r} in total_steps={total_steps}; warm up "
                f"for fewer than {parts * total_steps / 9:g} steps, train for more, or use decay 'none'"
            )
    if errors:
        raise ValueError("schedule: " + "; ".join(errors))
    if not warmup_steps and decay == "none":
        return None
    if start is None:
        start = 1 / (warmup_steps + 1)
    return _Schedule(
        optimizer, partial(factor, warmup_steps=warmup_steps, decay=decay, total_steps=total_steps, start=start)
    )


class _Schedule(LambdaLR):
    """Also sets the optimizer's learning rates when it is loaded, so it may be loaded before or after the optimizer."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group, lr in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = lr
