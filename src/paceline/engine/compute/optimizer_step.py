"""The optimizer step from summed gradients: scale, clip by the global norm, update.

With SGD a layer's factors are added to the momentum directly, ``buffer = mu buffer + left.T @ right``, so its
dense gradient is never computed. The global norm does not need it either: the squared norm of ``left.T @ right``
is the sum of ``(left @ left.T) * (right @ right.T)``. Nesterov's step is ``-lr (gradient + mu buffer)``;
with ``gradient = new buffer - mu old buffer`` it, too, computes that product only once.

*Invariants*: equal to the optimizer's own step up to reassociation; its state is the optimizer's own.
*Cost*: on a CPU, weight and buffer are read and written once, in blocks that stay in the cache between the operations.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.engine.checks import own_steps
from paceline.engine.compute import matmul
from paceline.engine.node.several_optimizers import members
from paceline.messages import Gradient, UpdateRule

BLOCK_VALUES = 1 << 19


@dataclass
class Factored:
    """A parameter, or a slice of one, whose gradient is left.T @ right. *Shapes*: (rows, out), (rows, in)."""

    parameter: Tensor
    left: Tensor
    right: Tensor

    def square_norm(self) -> Tensor:
        left, right = _wide(self.left), _wide(self.right)
        return ((left @ left.T) * (right @ right.T)).sum().clamp_min(0)


def optimizer_takes_factors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether factors can replace the gradient: any variant of SGD, without hooks that may need the gradient."""
    return (
        type(optimizer) is torch.optim.SGD
        and not own_steps.hooked(optimizer)
        and not any(group.get("differentiable") for group in optimizer.param_groups)
    )


def takes_gradients(model: torch.nn.Module) -> bool:
    """Whether dense gradients that are sent to nobody cost less than factors: on a GPU, with its 16-bit products."""
    return any(each.is_cuda for each in model.parameters())


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer whose step evaluates the loss several times."""
    for each in members(optimizer):
        closure = inspect.signature(type(each).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"optimizer {type(each).__name__} computes the loss several times per step (step needs a closure), but "
                f"a step agreed with others has one gradient; use one that steps from gradients, such as SGD or Adam"
            )


def finish(
    dense: Sequence[Tensor],
    factored: Sequence[Factored],
    optimizer: torch.optim.Optimizer,
    rule: UpdateRule,
    whole: Callable[[float], float],
) -> tuple[bool, float | None]:
    """Updates ``dense`` parameters by their .grad, the others by their factors. ``whole`` turns this process's sum of
    squares into the node's. Returns whether the update was applied, and the gradient's norm where the rule needs it."""
    squares = 0.0
    if rule.clip is not None or rule.check:
        squares = whole(square_norm([p.grad for p in dense if p.grad is not None], factored))
    applied, norm = step_if_finite(dense, optimizer, rule, squares)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]} if factored else {}
    for one in factored if applied else ():
        group = groups.get(id(one.parameter))
        if group is not None:
            step_factored(one, optimizer.state[one.parameter], group, _factor(rule, norm))
    return applied, norm


def step_if_finite(
    dense: Sequence[Tensor], optimizer: torch.optim.Optimizer, rule: UpdateRule, squares: float
) -> tuple[bool, float | None]:
    """The optimizer's step on each .grad, scaled and clipped. ``squares``: the sum of squares of the whole gradient,
    where the rule needs it. Returns as `finish` does."""
    needed = rule.clip is not None or rule.check
    norm = rule.scale * squares**0.5 if needed else None
    if rule.check and norm is not None and not math.isfinite(norm):
        return False, norm
    grads, factor = [p.grad for p in dense if p.grad is not None], _factor(rule, norm)
    for some in alike(grads) if factor != 1.0 else ():
        torch._foreach_mul_(some, factor)
    own_steps.step(optimizer)
    return True, norm


def _factor(rule: UpdateRule, norm: float | None) -> float:
    """By which each sum is multiplied."""
    if rule.clip is None or norm is None:
        return rule.scale
    return rule.scale * min(1.0, rule.clip / (norm + 1e-6))


def separate(dense: Sequence[Tensor], factored: Sequence[Factored]) -> None:
    """Clones gradients that share memory and are scaled in place: of ``x + (a + b)``, both gradients are one tensor."""
    factors = [side for one in factored for side in (one.left, one.right)]
    with_grad = [p for p in dense if p.grad is not None]
    grads = [p.grad for p in with_grad if p.grad is not None]
    if len({each.untyped_storage().data_ptr() for each in (*grads, *factors)}) == len(grads) + len(factors):
        return
    others, taken = list(map(_span, factors)), 0
    for (start, end), parameter in sorted(zip(map(_span, grads), with_grad, strict=True), key=lambda pair: pair[0]):
        if start < taken or any(start < its_end and its_start < end for its_start, its_end in others):
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()
        taken = max(taken, end)


def _span(tensor: Tensor) -> tuple[int, int]:
    """(start, end): the addresses of its values."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _wide(tensor: Tensor) -> Tensor:
    """In fp32, where the squares of 16-bit values neither overflow nor underflow."""
    return tensor.float() if tensor.itemsize < 4 else tensor


def square_norm(grads: Sequence[Tensor], factored: Sequence[Factored] = ()) -> float:
    """Of all of these, added up in the same order in every process, on whatever devices each has them. A GPU is waited
    for once per type."""
    norms: dict[int, float] = {}
    for some in alike(grads):
        norms |= zip(map(id, some), _read(norms_of(some)), strict=True)
    total = 0.0
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        for grad in grads:
            total += norms[id(grad)] ** 2 if grad.dtype == dtype else 0.0
    return total + sum(_read([one.square_norm() for one in factored]))


def alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of one type and device together."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:
        found.setdefault((each.dtype, each.device), []).append(each)
    return list(found.values())


def norms_of(grads: list[Tensor]) -> Sequence[Tensor]:
    """Each one's, of one type; of 16-bit values in fp32, where the squares neither overflow nor underflow."""
    found: Sequence[Tensor] = torch._foreach_norm(grads, 2, torch.float32 if grads[0].itemsize < 4 else None)
    return found


def _read(numbers: Sequence[Tensor]) -> list[float]:
    if not numbers or numbers[0].is_cpu or len({(each.dtype, each.device) for each in numbers}) > 1:
        return list(map(float, numbers))
    return torch.stack(list(numbers)).tolist()


@torch.no_grad()
def step_factored(one: Factored, state: dict[str, Any], group: dict[str, Any], factor: float) -> None:
    """w, b, g: weight, buffer, gradient with decay. b' = mu b + (1 - dampening) g, and w' = w - lr b' or Nesterov's."""
    lr, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
    if group["maximize"]:
        factor = -factor
    weight, left, right = one.parameter.data, one.left.T, one.right
    by_onednn = matmul.suits(weight)
    if by_onednn:
        right = right.T.contiguous()
    add = _add_by_onednn if by_onednn else _add
    keep, take, ahead = momentum, 1.0 - group["dampening"], 0.0
    buffer = state.get("momentum_buffer") if momentum else weight
    if buffer is None:
        buffer = state["momentum_buffer"] = torch.empty_like(weight)
        keep, take = 0.0, 1.0  # the first step's buffer is its gradient; beta 0 ignores the uninitialised memory
    elif group["nesterov"]:
        ahead = lr * momentum
    stride = lr * (1 + momentum) if group["nesterov"] else lr
    num_rows = max(1, BLOCK_VALUES // max(1, weight.shape[1]))
    if weight.is_cuda:  # whose cache is not worth hundreds of small products
        num_rows = max(1, len(weight))
    for start in range(0, len(weight), num_rows):
        rows = slice(start, start + num_rows)
        if not momentum:
            add(weight[rows], left[rows], right, 1 - lr * decay, -lr * factor)
            continue
        w, b = weight[rows], buffer[rows]
        if ahead:
            w.add_(b, alpha=ahead)  # w - lr (g + mu b') = (w + lr mu b) - lr (1 + mu) b'
        add(b, left[rows], right, keep - take * decay * ahead, factor * take)
        if decay:
            b.add_(w, alpha=take * decay)
        w.add_(b, alpha=-stride)


def multiply(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right, as a layer's factors are added to its momentum."""
    if matmul.suits(into):
        _add_by_onednn(into, left, right.T.contiguous(), 1.0, 1.0)
    else:
        _add(into, left, right, 1.0, 1.0)


def _add(into: Tensor, left: Tensor, right: Tensor, keep: float, take: float) -> None:
    """into = keep into + take left @ right; with keep = 0 the values of ``into`` are not read."""
    into.addmm_(left, right, beta=keep, alpha=take)


def _add_by_onednn(into: Tensor, left: Tensor, right: Tensor, keep: float, take: float) -> None:
    """The same, with ``right`` transposed."""
    product = matmul.times(left * take, right)
    if keep:
        torch.add(product, into, alpha=keep, out=into)
    else:
        into.copy_(product)


def parameter_grads(gradient: Gradient) -> Sequence[Tensor]:
    """Each parameter's part, in its shape."""
    if gradient.grads is not None:
        return gradient.grads
    assert gradient.flat is not None
    parts = torch.split(gradient.flat, list(gradient.bucket.numels))
    return [part.view(shape) for part, shape in zip(parts, gradient.bucket.shapes, strict=True)]


def laid_out_as(parameter: Tensor, grad: Tensor) -> Tensor:
    """The gradient in the parameter's memory layout, since fused optimizers ignore strides, and on its device."""
    grad = grad.to(parameter.device)
    return grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)
