"""Matrix products of large fully-connected layers by oneDNN, where torch's BLAS uses half of the processor's width.

MKL uses AVX2 on AMD processors, even on those with AVX-512: 86 instead of 206 GFlop/s on a core of one. oneDNN detects
the instruction set. The choice depends on the processor and on sizes alone, in updates on the weight's size alone, so
equal nodes compute equal results. PACELINE_MATMUL=blas or onednn overrides it for all layers.

*Invariants*: equal to torch's products up to the order of summation, including backward of any order.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.environment import variable

MIN_VALUES = 1 << 20  # of a layer's weight: smaller products take too little time to matter
MIN_INPUTS = 1 << 10  # likewise; equal for any slice of the weight's rows
SOME_VALUES, MANY_ROWS = 1 << 16, 256  # of a weight, and of its input: as in a transformer
FULL_WIDTH = 26  # from this CPU family on AMD's processors compute 512 bits at once; earlier ones twice 256
BLAS, ONEDNN = "blas", "onednn"


@cache
def fast() -> bool:
    """Whether oneDNN is to compute them here. Raises ValueError for an unknown PACELINE_MATMUL."""
    requested = variable("PACELINE_MATMUL")
    if requested not in ("", BLAS, ONEDNN):
        raise ValueError(f"PACELINE_MATMUL={requested!r} is not known; use {BLAS!r} or {ONEDNN!r}, or unset it")
    if requested == BLAS or not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return requested == ONEDNN or (torch._C.has_mkl and _amd() and _wide())


def _amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _wide() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@cache
def _full_width() -> bool:
    families = re.findall(r"^cpu family\s*: (\d+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE) if _amd() else []
    return bool(families) and int(families[0]) >= FULL_WIDTH


def suits(weight: Tensor) -> bool:
    """Whether products with a matrix like this one are faster by oneDNN: the same answer for any of its rows."""
    return _plain(weight) and weight.shape[1] >= MIN_INPUTS and fast()


def _plain(weight: Tensor) -> bool:
    plain = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.dim() == 2
    return plain and weight.is_contiguous()


def times(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right.T + bias``. *Shapes*: (m, k), (n, k), (n,)."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left.contiguous(), right.contiguous(), bias, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        return times(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (slope,), (x, weight) = slopes, ctx.saved_tensors
        rows = slope.reshape(-1, slope.shape[-1])
        by_weight = None
        if x is not None:
            inputs = x.reshape(-1, x.shape[-1])
            # torch's own product where backward itself needs a graph
            own = torch.is_grad_enabled() or not (_full_width() or rows.shape[1] * inputs.shape[1] >= MIN_VALUES)
            by_weight = rows.T @ inputs if own else times(rows.T, inputs.T)
        by_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return None if weight is None else _by_input(slope, rows, weight), by_weight, by_bias


def _by_input(slope: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """``slope @ weight``; by torch for few rows at full width, where oneDNN's reordering of the weight does not pay."""
    if torch.is_grad_enabled() or (_full_width() and len(rows) < MANY_ROWS):
        return slope @ weight
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), weight.T, None, "none", [], "")
    return product.view(*slope.shape[:-1], weight.shape[1])


class _Substitute(threading.local):
    """Of this thread: the layer whose next forward uses another weight, and that weight."""

    module: nn.Linear | None = None
    weight: Tensor


_substitute = _Substitute()


def substitute(module: nn.Linear | None, weight: Tensor) -> None:
    """In this thread ``module`` uses ``weight`` from now on, until another one is named; None: its own again.

    The layer must be one of `make_substitutable`.
    """
    _substitute.module, _substitute.weight = module, weight


def make_substitutable(module: nn.Module) -> None:
    if "forward" not in vars(module):
        module.forward = partial(_plainly, module)  # type: ignore[arg-type]


def _weight(module: nn.Linear) -> Tensor:
    return _substitute.weight if _substitute.module is module else module.weight


def _plainly(module: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, _weight(module), module.bias)


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    weight = _weight(module)
    plain = type(input) is Tensor and input.dtype == weight.dtype == torch.float32 and input.numel() > 0
    few = input.numel() < MANY_ROWS * input.shape[-1] and not _always(weight)
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if not plain or few or transformed or torch.is_autocast_enabled("cpu") or not weight.is_contiguous():
        return F.linear(input, weight, module.bias)
    product: Tensor = _Linear.apply(input, weight, module.bias)  # type: ignore[no-untyped-call]
    return product


def _always(weight: Tensor) -> bool:
    return weight.numel() >= MIN_VALUES and weight.shape[1] >= MIN_INPUTS


def _large(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            weight = module._parameters.get("weight")  # None where a parametrization computes it at each use
            if weight is not None and weight.numel() >= SOME_VALUES and _plain(weight) and fast():
                yield module


def install(model: nn.Module) -> None:
    """Large fully-connected layers use oneDNN from now on, except those with a forward of their own.

    Raises ValueError for an unknown PACELINE_MATMUL, whatever the layers.
    """
    for module in _large(model) if fast() else ():
        if "forward" not in vars(module):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def remove(model: nn.Module) -> None:
    for module in model.modules():
        if "forward" in vars(module) and not has_own_forward(module):
            del module.forward


def has_own_forward(module: nn.Module) -> bool:
    """Whether this object has a forward other than its class's."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "func", None) not in (_forward, _plainly)
