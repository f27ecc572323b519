"""Synchronised batch normalisation, over all processes' samples: the statistics of one process on the global batch.

    forward     count, sum and sum of squares per channel, added over all processes of all nodes
    backward    two sums per channel of the output's gradient, added likewise

A TorchFunctionMode, in which this thread computes, replaces every call of ``torch.nn.functional.batch_norm`` in a step,
in whatever layer. Backward runs outside of all modes: so a layer that activation checkpointing recomputes there enters
the mode in its own forward.

*Cost*: two sums of about 2 C numbers in each layer and step, each waiting for the slowest process; a Python call for
each torch function in forward.
*Invariants*: in float64 equal to one process on the whole batch, running statistics included.
*Source*: Ioffe & Szegedy 2015 (arXiv 1502.03167), equations of section 3, summed over processes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from paceline.engine.node.local_group import LocalGroupError

Total = Callable[[Tensor], Tensor]
Maybe = Tensor | None


@dataclass
class _Call:
    """The arguments of ``torch.nn.functional.batch_norm``."""

    input: Tensor
    running_mean: Maybe
    running_var: Maybe
    weight: Maybe = None
    bias: Maybe = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


# each function, and its arguments as a _Call
KNOWN: dict[Any, Callable[..., _Call]] = {torch.nn.functional.batch_norm: _Call} | dict.fromkeys(
    (torch.batch_norm, torch.ops.aten.batch_norm, torch.ops.aten.batch_norm.default),
    lambda input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True: _Call(
        input, running_mean, running_var, weight, bias, training, momentum, eps
    ),
)


class SyncBatchNorm:
    """The batch norm of a model; while converted, it uses all processes' samples in training.

    ``total`` adds a float64 vector over all processes. It is called only while ``inside()``: a forward pass outside
    of a step uses this process's samples alone. Names, parameters and modules stay the same.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._covered: dict[nn.Module, Any] = {}  # with the object's own forward, if any
        self._here = threading.local()
        self.answered: set[int] = set()  # ids of the running statistics that calls have used
        self._nameless = 0
        self._number()

    def _number(self) -> None:
        self._tensors = [*self.model.buffers(), *self.model.parameters()]
        self._numbers = {id(each): number for number, each in enumerate(self._tensors)}

    def convert(self, total: Total, inside: Callable[[], bool] = lambda: True) -> None:
        self.total, self.inside = total, inside
        for module in self.model.modules():
            if isinstance(module, _BatchNorm):
                self.cover(module)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Within, calls of ``batch_norm`` by this thread are replaced."""
        if getattr(self._here, "answers", False):
            yield
            return
        self._here.answers = True
        try:
            with _Answer(self):
                yield
        finally:
            self._here.answers = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around a step's forward pass and loss."""
        self._nameless = 0
        with self.answering():
            yield

    def cover(self, module: nn.Module) -> None:
        """Its forward enters the mode, wherever it is called from."""
        if module in self._covered:
            return
        self._covered[module] = own = module.__dict__.get("forward")
        # nn.SyncBatchNorm's own forward would wait for a process group of the user
        kind = _BatchNorm if type(module).forward is nn.SyncBatchNorm.forward else type(module)

        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self.answering():
                return own(*args, **kwargs) if own else kind.forward(self_, *args, **kwargs)

        module.forward = MethodType(forward, module)

    def restore(self) -> None:
        for module, own in self._covered.items():
            module.__dict__.pop("forward", None)
            if own:
                module.forward = own
        self._covered = {}

    def receive(self, vector: Tensor) -> None:
        """Updates the running statistics from a sum that was made while this process had no samples."""
        place, backward = divmod(int(vector[1] / vector[0]), 2)
        if backward or place >= len(self._tensors):
            return
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is self._tensors[place]:
                    counter = module._buffers.get("num_batches_tracked")
                    if counter is not None:
                        counter.add_(1)
                    variance = module._buffers.get(name.replace("mean", "var"))
                    _remember(buffer, variance, float(vector[2] / vector[0]), *_statistics(vector[3:]))
                    return

    def normalise(self, call: _Call) -> Tensor:
        self._cover_caller()
        self.answered |= {id(call.running_mean), id(call.running_var)}
        return _normalise(call, _Tagged(self.total, 2 * self._place(call)))

    def _place(self, call: _Call) -> int:
        """This call's number, equal in every process: that of its statistics or weight, else its order in the step."""
        keys = [each for each in (call.running_mean, call.weight) if each is not None]
        for again in (False, True):
            if again:
                self._number()  # tensors may have been replaced
            for key in keys:
                if (number := self._numbers.get(id(key))) is not None:
                    return number
        self._nameless += 1
        return len(self._tensors) + self._nameless - 1

    def _cover_caller(self) -> None:
        """Covers the calling module: activation checkpointing may recompute it in backward."""
        frame: FrameType | None = sys._getframe(3)
        while frame:
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and frame.f_code.co_name == "forward":
                self.cover(caller)
                return
            if frame.f_code.co_filename == checkpoint.__file__:
                raise ValueError(
                    "batch_norm='sync': batch_norm is called in a function that activation checkpointing computes "
                    "again in backward; call it in the forward of a module inside of what is checkpointed, such as "
                    "torch.nn.BatchNorm2d, or use batch_norm='local'"
                )
            frame = frame.f_back


class _Answer(TorchFunctionMode):
    def __init__(self, layers: SyncBatchNorm):
        super().__init__()
        self.layers = layers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "batch_norm" in getattr(func, "__name__", "") and self.layers.inside():
            if read := KNOWN.get(func):
                call = read(*args, **kwargs)
                if call.training:
                    return self.layers.normalise(call)
            elif kwargs.get("training", next((each for each in args if isinstance(each, bool)), True)):
                raise ValueError(
                    f"batch_norm='sync': a layer calls {func.__name__}, whose statistics are of this process's samples "
                    f"alone; call torch.nn.functional.batch_norm instead, or use batch_norm='local'"
                )
        return func(*args, **kwargs)


class _Tagged:
    """Sums that check that every process adds the same layer and direction."""

    def __init__(self, total: Total, tag: int):
        self.total, self.tag = total, tag

    def __call__(self, numbers: Tensor, direction: int) -> Tensor:
        return self._sum(numbers, direction)[2:].to(numbers.device)

    def mean_of_first(self, numbers: Tensor) -> tuple[float, Tensor]:
        """(the mean of all processes' first number, the sums of all others), forward."""
        whole = self._sum(numbers, 0)
        return float(whole[2] / whole[0]), whole[3:].to(numbers.device)

    def _sum(self, numbers: Tensor, direction: int) -> Tensor:
        tag = float(self.tag + direction)
        vector = torch.cat([torch.tensor([1.0, tag], dtype=torch.float64), numbers.to("cpu", torch.float64)])
        whole = self.total(vector)
        if len(whole) != len(vector) or whole[1] != whole[0] * tag:
            raise LocalGroupError(
                "batch_norm='sync': the processes are in different batch-norm layers, so their models took different "
                "paths for their rows; use batch_norm='local'"
            )
        return whole


def _normalise(call: _Call, total: _Tagged) -> Tensor:
    x = call.input
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    with torch.no_grad():
        wide = x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
        variance, mean = torch.var_mean(wide, dims, correction=0) if count else wide.new_zeros(2, x.shape[1])
        mean, variance = mean.double(), variance.double()
        # (1 + 1 + C + C): the momentum and the counts of all, their sums and their sums of squares
        head = mean.new_tensor([call.momentum, count])
        momentum, sums = total.mean_of_first(torch.cat([head, count * mean, count * (variance + mean * mean)]))
        whole, mean, variance = _statistics(sums)
        if whole <= 1:
            raise ValueError(f"batch norm needs more than 1 value per channel over all processes, got {whole:g}")
        _remember(call.running_mean, call.running_var, momentum, whole, mean, variance)
    normalised: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, call.weight, call.bias, mean.to(wide.dtype), variance.to(wide.dtype), call.eps, whole, total
    )
    return normalised


def _statistics(sums: Tensor) -> tuple[float, Tensor, Tensor]:
    """(count, mean, variance) from count, sums and sums of squares."""
    whole = float(sums[0])
    mean, squares = sums[1:].view(2, -1) / whole
    return whole, mean, (squares - mean * mean).clamp_min(0)


def _remember(
    running_mean: Maybe, running_var: Maybe, momentum: float, whole: float, mean: Tensor, variance: Tensor
) -> None:
    """Updates the running statistics; the running variance is that of the unbiased variance."""
    for running, current in ((running_mean, mean), (running_var, variance * (whole / (whole - 1)))):
        if running is not None:
            running.mul_(1 - momentum).add_(current.to(running), alpha=momentum)


def _wide(weight: Maybe, mean: Tensor) -> Maybe:
    """The weight in the type of the statistics: PyTorch's kernel needs both in 16 bits or both in 32."""
    return None if weight is None else weight.to(mean.dtype)


class _Normalise(torch.autograd.Function):
    """y = weight (x - mean) / sqrt(variance + eps) + bias, with statistics that depend on all processes' x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, variance: Tensor, *rest: Any) -> Tensor:
        """``rest``: eps, the count of all samples, their `_Tagged`."""
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.types = [None if each is None else each.dtype for each in (weight, bias)]
        ctx.eps, ctx.whole, ctx.total = rest
        weight, bias = _wide(weight, mean), _wide(bias, mean)
        return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, ctx.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        inverse = torch.rsqrt(variance + ctx.eps)
        # sum of dy, and of dy (x - mean) / deviation: those of this process's rows are its parameters' gradients
        dot = plain = torch.zeros_like(mean)
        if x.numel():  # PyTorch's kernel divides by this count
            none = mean.new_empty(0)  # what its forward saves in evaluation mode; the one for GPUs refuses None
            _, dot, plain = torch.ops.aten.native_batch_norm_backward(
                dy, x, _wide(weight, mean), mean, variance, none, none, False, ctx.eps, [False, True, True]
            )
        sums = ctx.total(torch.cat([plain, dot]), 1).view(2, -1) / ctx.whole
        mean_dy, mean_dot = sums.to(mean.dtype)
        scale = inverse if weight is None else weight.to(inverse.dtype) * inverse
        slope = -scale * inverse * mean_dot
        offset = -scale * mean_dy - slope * mean
        shape = [1, -1] + [1] * (x.dim() - 2)
        # dx = scale dy + slope x + offset
        dx = torch.addcmul(offset.view(shape), x.to(mean.dtype), slope.view(shape)).addcmul_(dy, scale.view(shape))
        grads = [each.to(kind) if kind else None for each, kind in zip((dot, plain), ctx.types, strict=True)]
        return dx.to(x.dtype), *grads, None, None, None, None, None
