"""Factors of fully-connected layers, beside the gradients that autograd computes as always.

    gradient of a weight   G = left.T @ right: left is the gradient of the layer's output, right its input, a row each
    all ranks' sum         of G: (all ranks' rows of left).T @ (all ranks' rows of right)

Rows are taken during forward and backward, from no module that would remember it. That they make the whole gradient is
checked against the gradient itself. In every step by one random vector: a part from elsewhere (a second use, a penalty,
earlier passes) that is more than about 1e-5 of the gradient's norm is noticed, and this step's gradient is sent whole.
In the first steps and every `EVERY` row by row, to rounding: then also a smaller part, which Adam would make as large,
sends the weight whole for good. So do hooks on the weight, and some steps of more rows than pay.

*Source*: sufficient factors: Xie et al. 2016 (UAI). One random vector: Freivalds 1977 (IFIP Congress, p. 839).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from paceline.engine.compute.gradient_hooks import cut

ROUNDING = 64  # units in the last place by which two sums in another order may differ
FIRST, EVERY = 4, 50  # steps that are checked row by row
CHUNK = 256  # rows of a gradient at a time
MAX_MISSED = 3  # steps in a row without all rows


class Weight:
    """A fully-connected weight, and what this step has taken of its layer. *Shapes*: (out, in)."""

    def __init__(self, name: str, parameter: Tensor):
        self.name, self.parameter = name, parameter
        generator = torch.Generator().manual_seed(parameter.numel())  # torch's default one is the script's
        # of either sign, and none near zero: no row of a gradient is looked at less than another
        self.probe = 1 + torch.rand(parameter.shape[0], generator=generator, dtype=parameter.dtype)
        self.probe *= 1 - 2 * torch.randint(0, 2, self.probe.shape, generator=generator)
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.count, self.missed, self.num_missed, self.num_checks = 0, False, 0, 0
        self.impure = False  # it has a gradient from elsewhere, however small

    @property
    def hopeless(self) -> bool:
        return self.impure or self.num_missed >= MAX_MISSED

    def takes(self, rows: int, most: int) -> bool:
        """Whether so many rows more are worth keeping; where not, this step's gradient is sent whole."""
        self.count += rows
        self.missed |= self.count > most
        if self.missed:
            self.rows.clear()
        return not self.missed

    def forget(self) -> None:
        self.rows, self.count, self.missed = [], 0, False

    def whole(self, gradient: Tensor) -> tuple[Tensor, Tensor] | None:
        """(left, right), a row for each sample, where these are all of ``gradient``: copies, since what is saved for
        backward may be overwritten in it. Forgets them."""
        rows, missed = self.rows, self.missed
        self.num_missed = self.num_missed + 1 if missed else 0
        self.forget()
        if self.parameter._backward_hooks or getattr(self.parameter, "_post_accumulate_grad_hooks", None):
            self.impure = True
        if missed or self.impure or not rows or any(each.dtype != gradient.dtype for pair in rows for each in pair):
            return None
        left, right = (torch.cat(side) for side in zip(*rows, strict=True))
        theirs, ours = self.probe @ gradient, (left @ self.probe) @ right
        bound = ROUNDING * torch.finfo(gradient.dtype).eps * (theirs.norm() + ours.norm())
        if not bool((theirs - ours).norm() <= bound):
            return None
        self.num_checks += 1
        if self.num_checks <= FIRST or self.num_checks % EVERY == 0:
            self.impure = not _same_rows(left, right, gradient)
        return None if self.impure else (left, right)


def _same_rows(left: Tensor, right: Tensor, gradient: Tensor) -> bool:
    """Whether every row of the product is that of the gradient, as closely as sums of so many terms can be."""
    lengths = right.norm(dim=1)
    unit = ROUNDING * torch.finfo(gradient.dtype).eps
    for some, part in zip(left.split(CHUNK, 1), gradient.split(CHUNK), strict=True):  # type: ignore[no-untyped-call]
        apart = (some.T @ right - part).norm(dim=1)
        if not bool((apart <= unit * (some.abs().T @ lengths)).all()):
            return False
    return True


class Factors:
    """The weights of ``module`` that may travel as factors among ``size`` ranks; none without a module."""

    def __init__(self, module: nn.Module | None, size: int):
        module = nn.Module() if module is None else module
        parameters, self.size = dict(module.named_parameters()), size
        self.weights = {
            id(layers[0]): Weight(name, parameters[name])
            for name, layers in cut(module)[1].items()
            if len(layers) == 1 and _plain(parameters[name])
        }
        self.of = {id(weight.parameter): weight for weight in self.weights.values()}

    def drop(self, weight: Weight) -> None:
        """It is sent whole from now on."""
        self.of.pop(id(weight.parameter), None)
        self.weights = {key: each for key, each in self.weights.items() if each is not weight}

    def most(self, weight: Weight) -> int:
        """Rows of a rank that are as many bytes as its part of a ring's sum of the whole gradient."""
        out, into = weight.parameter.shape
        return int(2 * out * into / (self.size * (out + into)))

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Every layer's rows are taken while forward runs, and the backward passes of what it returns."""
        handle = register_module_forward_hook(self._look)
        try:
            yield
        finally:
            handle.remove()

    def _look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        weight = self.weights.get(id(module))
        if weight is None or not torch.is_grad_enabled():
            return
        if len(inputs) != 1 or not isinstance(output, Tensor) or saved_elsewhere():
            weight.missed = True
            return
        right = inputs[0].detach()
        if output.requires_grad and weight.takes(right.numel() // right.shape[-1], self.most(weight)):
            output.register_hook(lambda left: _keep(weight, left.detach(), right))  # type: ignore[no-untyped-call]


def _plain(parameter: Tensor) -> bool:
    """Of fewer bits the check could not tell a difference from rounding; a subclass may be divided among ranks."""
    known = type(parameter) is nn.Parameter and parameter.dtype in (torch.float32, torch.float64)
    return known and parameter.device.type == "cpu"


def _keep(weight: Weight, left: Tensor, right: Tensor) -> None:
    if not weight.missed:
        weight.rows.append((left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])))


def saved_elsewhere() -> bool:
    """Whether activations are computed again, or kept elsewhere, to save memory: then they are not kept here."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
