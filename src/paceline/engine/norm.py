"""Batch normalisation over everyone's rows: the statistics of one process on the global batch.

    forward     count, sum and sum of squares per channel, added over all processes of all nodes
    backward    two sums per channel of the output's gradient, added likewise

*Cost*: two sums of about 2 C numbers in each layer and step, each waiting for the slowest.
*Laws*: float64 equal to one process on the whole batch, running statistics included.
*Source*: Ioffe & Szegedy 2015 (arXiv 1502.03167), equations of section 3, summed over processes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.engine.crew import CrewError

Total = Callable[[Tensor], Tensor]


class Layers:
    """The batch-norm layers of a model; while converted, they use everyone's rows in training.

    ``total`` adds a float64 vector over everyone; only while ``inside()`` is it called, so that a forward
    pass outside of a step is this process's own. Names, parameters and modules stay the same.
    """

    def __init__(self, model: nn.Module):
        self.layers = [
            m for m in model.modules() if isinstance(m, _BatchNorm) and type(m).forward is _BatchNorm.forward
        ]

    def convert(self, total: Total, inside: Callable[[], bool] = lambda: True) -> None:
        for place, layer in enumerate(self.layers):

            def forward(self: _BatchNorm, x: Tensor, place: int = place) -> Tensor:
                if not (self.training and inside()):
                    return _BatchNorm.forward(self, x)
                return _normalise(self, x, _Tagged(total, 2 * place))

            layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]

    def restore(self) -> None:
        for layer in self.layers:
            layer.__dict__.pop("forward", None)

    def hear(self, vector: Tensor) -> None:
        """What was added up while this process had no rows: its running statistics are everyone's all the same."""
        place, backward = divmod(int(vector[1] / vector[0]), 2)
        if not backward:
            _remember(self.layers[place], *_statistics(vector[2:]))


class _Tagged:
    """Sums that must be those of one layer and direction on every process."""

    def __init__(self, total: Total, tag: int):
        self.total, self.tag = total, tag

    def __call__(self, numbers: Tensor, direction: int) -> Tensor:
        tag = float(self.tag + direction)
        vector = torch.cat([torch.tensor([1.0, tag], dtype=torch.float64), numbers.to("cpu", torch.float64)])
        whole = self.total(vector)
        if len(whole) != len(vector) or whole[1] != whole[0] * tag:
            raise CrewError(
                "batch_norm='sync': the processes are in different batch-norm layers, so their models took different "
                "paths for their rows; use batch_norm='local'"
            )
        return whole[2:].to(numbers.device)


def _normalise(layer: _BatchNorm, x: Tensor, total: _Tagged) -> Tensor:
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    with torch.no_grad():
        wide = x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
        variance, mean = torch.var_mean(wide, dims, correction=0) if count else wide.new_zeros(2, x.shape[1])
        mean, variance = mean.double(), variance.double()
        # (1 + C + C): the counts of all, their sums and their sums of squares
        sums = total(torch.cat([mean.new_tensor([count]), count * mean, count * (variance + mean * mean)]), 0)
        whole, mean, variance = _statistics(sums)
        if whole <= 1:
            raise ValueError(f"batch norm needs more than 1 value per channel over all processes, got {whole:g}")
        _remember(layer, whole, mean, variance)
    normalised: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, layer.weight, layer.bias, mean.to(wide.dtype), variance.to(wide.dtype), layer.eps, whole, total
    )
    return normalised


def _statistics(sums: Tensor) -> tuple[float, Tensor, Tensor]:
    """(count, mean, variance) from count, sums and sums of squares."""
    whole = float(sums[0])
    mean, squares = sums[1:].view(2, -1) / whole
    return whole, mean, (squares - mean * mean).clamp_min(0)


def _remember(layer: _BatchNorm, whole: float, mean: Tensor, variance: Tensor) -> None:
    """The running variance is of the unbiased one."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    momentum = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked or 1)
    for running, now in ((layer.running_mean, mean), (layer.running_var, variance * (whole / (whole - 1)))):
        running.mul_(1 - momentum).add_(now.to(running), alpha=momentum)


def _wide(weight: Tensor | None, mean: Tensor) -> Tensor | None:
    """PyTorch's kernel wants weights of 16 bits beside statistics of as many, or both in 32."""
    return None if weight is None else weight.to(mean.dtype)


class _Normalise(torch.autograd.Function):
    """y = weight (x - mean) / sqrt(variance + eps) + bias, with statistics that depend on everyone's x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        whole: float,
        total: _Tagged,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.whole, ctx.total = eps, whole, total
        weight, bias = _wide(weight, mean), _wide(bias, mean)
        return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        inverse = torch.rsqrt(variance + ctx.eps)
        # sum of dy, and of dy (x - mean) / deviation: those of this process's rows are its parameters' gradients
        dot = plain = torch.zeros_like(mean)
        if x.numel():  # PyTorch's kernel divides by it
            _, dot, plain = torch.ops.aten.native_batch_norm_backward(
                dy, x, _wide(weight, mean), mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        sums = ctx.total(torch.cat([plain, dot]), 1).view(2, -1) / ctx.whole
        mean_dy, mean_dot = sums.to(mean.dtype)
        scale = inverse if weight is None else weight.to(inverse.dtype) * inverse
        slope = -scale * inverse * mean_dot
        offset = -scale * mean_dy - slope * mean
        shape = [1, -1] + [1] * (x.dim() - 2)
        # dx = scale dy + slope x + offset
        dx = torch.addcmul(offset.view(shape), x.to(mean.dtype), slope.view(shape)).addcmul_(dy, scale.view(shape))
        grads = (dot.to(weight.dtype), plain.to(weight.dtype)) if weight is not None else (None, None)
        return dx.to(x.dtype), *grads, None, None, None, None, None
