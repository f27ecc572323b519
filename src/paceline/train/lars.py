"""LARS: SGD with momentum, in which the step of each layer is scaled by the norm of its weights.

trust = c |w| / (|g| + decay |w| + eps), buffer = momentum buffer + trust (g + decay w), w = w - lr buffer

*Use*: global batches of thousands, with warm-up and the "poly" decay (`lr_schedule`). *Start*: the learning rate has
another scale than SGD's: at 1 and trust 0.001 a gradient moves a layer by a thousandth of its norm. *Incompatible with*
weights of which a process holds only slices, since LARS needs their norms.

*Source*: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", arXiv 1708.03888 (2017).
Differences here: the learning rate is outside the momentum, as in torch.optim.SGD, so its changes need no correction;
biases and normalisation weights (fewer than two dimensions) have neither trust nor decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """Arguments as of torch.optim.SGD, and ``trust``. State: one ``momentum_buffer`` per parameter.

    Where weights or gradient are zero, trust is 1. Raises ValueError with all errors at once.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 0.001,
        eps: float = 1e-8,
    ):
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        errors = [f"{name} must be at least 0, got {value}" for name, value in options.items() if not value >= 0]
        if errors:
            raise ValueError("LARS: " + "; ".join(errors))
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            groups_alike: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    groups_alike.setdefault((weight.dtype, weight.device, weight.ndim > 1), []).append(weight)
            for (_, _, layered), weights in groups_alike.items():
                self._update(weights, group, layered)
        return loss

    def _update(self, weights: list[Tensor], group: dict[str, Any], layered: bool) -> None:
        grads = [weight.grad for weight in weights if weight.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise ValueError("LARS needs dense gradients, got a sparse one; build the embedding with sparse=False")
        buffers = [self._buffer(weight, group["momentum"]) for weight in weights]
        torch._foreach_mul_(buffers, group["momentum"])
        if layered:
            trusts = _trusts(weights, grads, group)
            torch._foreach_addcmul_(buffers, grads, trusts.unbind())
            if group["weight_decay"]:
                torch._foreach_addcmul_(buffers, weights, (trusts * group["weight_decay"]).unbind())
        else:
            torch._foreach_add_(buffers, grads)
        torch._foreach_add_(weights, buffers, alpha=-group["lr"])

    def _buffer(self, weight: Tensor, momentum: float) -> Tensor:
        if not momentum:
            return torch.zeros_like(weight)
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _trusts(weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> Tensor:
    """*Shapes*: (len(weights),). Norms of 16-bit tensors are computed in 32 bits, because in 16 bits they overflow."""
    wide = torch.promote_types(weights[0].dtype, torch.float32)
    w = torch.stack(torch._foreach_norm(weights, 2, wide))
    g = torch.stack(torch._foreach_norm(grads, 2, wide))
    trusts = group["trust"] * w / (g + group["weight_decay"] * w + group["eps"])
    return torch.where((w > 0) & (g > 0), trusts, 1.0)
