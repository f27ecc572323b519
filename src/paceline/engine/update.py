"""Agreed sums become an update: scale, clip by the global norm, optimizer step.

With plain SGD a layer's factors enter the momentum directly, ``buffer = mu buffer + left.T @ right``,
so its dense gradient never exists. The global norm needs none either: the squared norm of
``left.T @ right`` is the sum of ``(left @ left.T) * (right @ right.T)``.

*Laws*: the optimizer's own step up to reassociation; its state is the optimizer's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.contract import Rule


@dataclass
class Factored:
    """A parameter, or a slice of one, whose gradient is left.T @ right. *Shapes*: (rows, out), (rows, in)."""

    parameter: Tensor
    left: Tensor
    right: Tensor

    def square_norm(self) -> Tensor:
        return ((self.left @ self.left.T) * (self.right @ self.right.T)).sum().clamp_min(0)


def takes_factors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every group is SGD as the textbook has it: momentum and weight decay, nothing else."""
    return type(optimizer) is torch.optim.SGD and not any(
        group["nesterov"] or group["dampening"] or group["maximize"] or isinstance(group["lr"], Tensor)
        for group in optimizer.param_groups
    )


def finish(
    dense: Sequence[Tensor],
    factored: Sequence[Factored],
    optimizer: torch.optim.Optimizer,
    rule: Rule,
    whole: Callable[[float], float],
) -> tuple[bool, float | None]:
    """Updates ``dense`` parameters by their .grad, the others by their factors.

    ``whole`` completes this process's sum of squares to the node's. Returns whether the update was made, and the
    norm of the gradient where the rule needed it.
    """
    grads = [p.grad for p in dense if p.grad is not None]
    factor, norm = rule.scale, None
    if rule.clip is not None or rule.check:
        squares = sum(float(norm) ** 2 for norm in torch._foreach_norm(grads)) if grads else 0.0
        squares += sum(float(f.square_norm()) for f in factored)
        norm = rule.scale * whole(squares) ** 0.5
        if rule.check and not math.isfinite(norm):
            return False, norm
        if rule.clip is not None:
            factor *= min(1.0, rule.clip / (norm + 1e-6))
    if factor != 1.0 and grads:
        torch._foreach_mul_(grads, factor)
    optimizer.step()
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for one in factored:
        group = groups.get(id(one.parameter))
        if group is not None:
            _step(one, optimizer, group["lr"], group["momentum"], group["weight_decay"], factor)
    return True, norm


@torch.no_grad()
def _step(
    one: Factored, optimizer: torch.optim.Optimizer, lr: float, momentum: float, decay: float, factor: float
) -> None:
    weight, left, right = one.parameter, one.left.T, one.right
    if not momentum:
        weight.addmm_(left, right, beta=1 - lr * decay, alpha=-lr * factor)
        return
    state = optimizer.state[weight]
    buffer = state.get("momentum_buffer")
    if buffer is None:
        buffer = state["momentum_buffer"] = torch.mm(left, right).mul_(factor)
    else:
        buffer.addmm_(left, right, beta=momentum, alpha=factor)
    if decay:
        buffer.add_(weight, alpha=decay)
    weight.add_(buffer, alpha=-lr)
