"""Numbers of a step that a GPU still computes: losses, weights, metric, norm. Alone, the update does not wait for them.

Torch's fused optimizers change nothing where a flag on the GPU is set: here, where loss or gradient is not finite, or
nothing counts. It stays set until `UnreadUpdate.again`, so later steps change nothing either.

*Invariants*: equal to the update that reads first; a step that must be refused leaves weights and state as they were.
*Source*: the flag is `found_inf` of torch.amp.GradScaler (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline import contract
from paceline.engine.checks import own_steps
from paceline.engine.compute import batch as batches
from paceline.engine.compute.batch import Awaited, Judged, Measured, awaited
from paceline.engine.compute.local_step import LocalStep
from paceline.engine.compute.optimizer_step import Factored, alike, norms_of
from paceline.engine.node.several_optimizers import members
from paceline.messages import Update, UpdateRule, Vote

SKIP = (SGD, Adam, AdamW)  # fused on a GPU, with a flag
AGAINST = ("differentiable", "capturable")


class StepNumbers:
    """What the passes of a step return, one micro-batch after the other. ``names``: of the parts of the loss."""

    def __init__(self) -> None:
        self.measured, self.names = Measured(), tuple[str, ...]()
        self._losses, self._weights = list[Awaited](), list[Awaited | float]()
        self._terms = list[dict[str, Awaited]]()
        self._on_device: list[tuple[Tensor, Tensor | float, Tensor | float]] = []

    def put(self, judged: Judged) -> None:
        """Raises ValueError where micro-batches give other parts."""
        value, times, weight, named = judged
        factor = awaited(times)
        self._losses.append(Awaited(value, factor))
        self._weights.append(factor if weight is times else awaited(weight))
        if self._terms and tuple(named) != self.names:
            raise ValueError(
                f"the loss gave the parts {', '.join(named) or 'none'} of one micro-batch and "
                f"{', '.join(self.names) or 'none'} of another; give the same everywhere, with 0 for a part "
                f"that is missing"
            )
        self._terms.append(named)
        self.names = tuple(named)
        self._on_device.append((value.detach(), times, weight))

    def read(self, vote: Vote) -> tuple[tuple[str, ...], str]:
        """Waits for all, and fills the vote. Returns the names of the metric's values, and why there are none."""
        vote.metric_sum = self.measured.total()
        vote.loss_sum = sum(map(float, self._losses), start=0.0)
        vote.weight = sum(map(float, self._weights), start=0.0)
        columns = zip(*(each.values() for each in self._terms), strict=True)
        sums = tuple(sum(map(float, column)) for column in columns)
        vote.terms, names, why = self.measured.after(sums)
        vote.finite = math.isfinite(vote.loss_sum)
        return names, why

    @property
    def weight(self) -> Tensor | float:
        """The sum of all weights, on the device where one of them is."""
        return sum((weight for *_, weight in self._on_device), start=0.0)

    def are_finite(self) -> Tensor:
        """Whether the losses are, on their device; one of which nothing counts, is."""
        return torch.stack([value.isfinite() | (times == 0) for value, times, _ in self._on_device]).all()


class ReadsLater(contract.Engine):
    """An engine in one process. ``reads_later``: of the next step, `gradient` leaves the vote as it is, and the losses
    in ``numbers``, until `read`."""

    local_step: LocalStep
    numbers: StepNumbers
    reads_later = False

    def read(self, vote: Vote, numbers: StepNumbers) -> None:
        """Fills the vote of a step."""
        raise NotImplementedError

    def placed(self, update: Update, scaled: bool) -> tuple[list[Tensor], list[Factored]]:
        """(the parameters with their gradient in .grad, those with factors). ``scaled``: .grad will be, in place."""
        raise NotImplementedError


def serves(optimizer: Optimizer, weights: Sequence[Tensor]) -> bool:
    """Whether the optimizer can leave out its step by a flag on the GPU that has all the weights."""
    on_one_gpu = len({each.device for each in weights}) == 1 and all(map(batches.on_gpu, weights))
    own = not own_steps.hooked(optimizer) and all(type(each) in SKIP for each in members(optimizer))
    return own and on_one_gpu and all(each.is_floating_point() for each in weights) and _may_be_fused(optimizer)


def _may_be_fused(optimizer: Optimizer) -> bool:
    """Nobody has asked for another implementation."""
    return all(
        (group.get("fused") or (group.get("fused") is None and group.get("foreach") is None))
        and not any(group.get(name) for name in AGAINST)
        for group in optimizer.param_groups
    )


class UnreadUpdate:
    """Updates of one optimizer, each of which may be left out without anybody on the host knowing."""

    def __init__(self, optimizer: Optimizer, device: torch.device):
        self.optimizer, self._flag = optimizer, torch.zeros((), device=device)

    def ready(self) -> bool:
        """Whether the optimizer has all its state: a first step that is left out would leave memory of any content."""
        if not _may_be_fused(self.optimizer):
            return False
        for each in members(self.optimizer):
            for group in each.param_groups:
                needed = "step" if type(each) is not SGD else "momentum_buffer" if group["momentum"] else ""
                trained = (p for p in group["params"] if p.requires_grad) if needed else ()
                if any(self.optimizer.state.get(parameter, {}).get(needed) is None for parameter in trained):
                    return False
        return True

    @torch.no_grad()
    def __call__(self, dense: Sequence[Tensor], rule: UpdateRule, numbers: StepNumbers) -> Awaited:
        """Updates ``dense`` parameters by their .grad. Returns the gradient's norm. The rule's scale is divided by the
        weight of ``numbers``."""
        grads = [parameter.grad for parameter in dense if parameter.grad is not None]
        norms = [norm.double() for some in alike(grads) for norm in norms_of(some)]
        scale = rule.scale / numbers.weight
        norm = torch.stack(norms).square().sum().sqrt() * scale
        failed = (norm.isfinite() & numbers.are_finite()).logical_not()
        self._flag = torch.maximum(self._flag, failed.to(self._flag.dtype))
        factor = scale if rule.clip is None else scale * (rule.clip / (norm + 1e-6)).clamp_max(1.0)
        for some in alike(grads) if isinstance(factor, Tensor) or factor != 1.0 else ():
            torch._foreach_mul_(some, factor.to(some[0].dtype) if isinstance(factor, Tensor) else factor)
        with _fused(self.optimizer, self._flag):
            own_steps.step(self.optimizer)
        return Awaited(norm)

    def again(self) -> None:
        """Updates are made again."""
        self._flag = torch.zeros_like(self._flag)


@contextmanager
def _fused(optimizer: Optimizer, flag: Tensor) -> Iterator[None]:
    """Within, its steps are fused, and left out where the flag is 1."""
    before = [(group, group.get("fused"), group.get("foreach")) for group in optimizer.param_groups]
    for group, *_ in before:
        group["fused"], group["foreach"] = True, False
        for parameter in group["params"]:
            number = optimizer.state.get(parameter, {}).get("step")
            if number is not None and number.device != flag.device:
                optimizer.state[parameter]["step"] = number.to(flag.device, torch.float32)
    for each in members(optimizer):
        each.found_inf = flag
    try:
        yield
    finally:
        for each in members(optimizer):
            del each.found_inf
        for group, fused, foreach in before:
            group["fused"], group["foreach"] = fused, foreach
