"""SGD from factors: the gradient of a large fully-connected weight is never computed. By PACELINE_DDP_OPTIMIZER=fused.

    forward, backward    of each such layer: its input and the gradient of its output are kept, a row for each sample
    optimizer.step()     first: an all-gather of all ranks' rows, whose product each rank adds to the momentum
    .grad                stands for the rows that are kept. Cleared, it forgets them; to whoever reads it, an error

Only a script that leaves `.grad` alone between backward and step can have it, which nobody can see: so it is asked for.
Rows that are more bytes than their product are multiplied before they are summed, as any other gradient.

*Invariants*: torch's class with the same SGD, up to the order of sums; replicas bit-equal, or an error.
*Source*: sufficient factors: Xie et al. 2016 (UAI); into the momentum: `engine/compute/optimizer_step.py`.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.ddp.exchange import checksum
from paceline.ddp.factors import saved_elsewhere
from paceline.engine.compute.batch import leaves
from paceline.engine.compute.gradient_hooks import Backward, Call, Pass
from paceline.engine.compute.optimizer_step import Factored, optimizer_takes_factors, step_factored
from paceline.messages import FACTORS, Bucket, Gradient
from paceline.report.log import log

dist: Any = torch.distributed  # its stubs leave out what we use

VARIABLE, FUSED = "PACELINE_DDP_OPTIMIZER", "fused"
WITHOUT = f"without {VARIABLE}={FUSED} this script runs as it is"
UNUSED, IMPURE = -1, -2  # instead of a number of rows
_alive: weakref.WeakSet[Fused] = weakref.WeakSet()


class Unread(Tensor):
    """In the place of a gradient that is not computed. ``name``: of its weight. ``cleared``: it was set to zero."""

    name, cleared = "", False

    @classmethod
    def of(cls, name: str, weight: Tensor) -> Unread:
        made: Unread = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)  # type: ignore[attr-defined]
        made.name = name
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zero_.default:
            args[0].cleared = True
            return args[0]
        name = next(each.name for each in leaves((args, kwargs)) if isinstance(each, cls))
        raise RuntimeError(
            f"{VARIABLE}={FUSED}: the gradient of {name!r} is not computed, and {func} uses it (of clipping, a scaler, "
            f"a look at .grad, a penalty on the weight); {WITHOUT}"
        )


class _Recording(Backward):
    """Keeps the rows of each layer from backward to the optimizer's step."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.watch(early=False)
        self.forms = [FACTORS if bucket.linear else "" for bucket in self.buckets]
        self.kept: defaultdict[int, list[Call]] = defaultdict(list)
        self.impure = set[int]()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Each one has its own rows, which end with its graph where nobody goes backward through it."""
        state = self._pass = Pass(self.forms, lambda _: None)
        try:
            yield
        finally:
            self._pass, state.own_pass = None, True
            for index in state.hidden:  # of layers that an error has interrupted
                self.parameters[self.buckets[index].names[0]].requires_grad_(True)

    def _enter(self, bucket: Bucket, module: nn.Linear) -> None:
        if not saved_elsewhere():  # what is computed again in backward is computed with the weight in the graph
            super()._enter(bucket, module)

    def _record(self, state: Pass, bucket: Bucket, call: Call, left: Tensor) -> None:
        before = call.left
        super()._record(state, bucket, call, left)
        if call.left is before:
            self.impure |= state.impure_factors
            return
        weight = self.parameters[bucket.names[0]]
        if _forgotten(weight.grad):
            self.kept[bucket.index].clear()
            weight.grad = Unread.of(bucket.names[0], weight)
        self.kept[bucket.index].append(call)

    def since_step(self, bucket: Bucket) -> Gradient | int:
        """All rows since the last step, or why there are none. Forgets them."""
        weight, calls = self.parameters[bucket.names[0]], self.kept.pop(bucket.index, [])
        grad, weight.grad = weight.grad, None
        if bucket.index in self.impure or not (grad is None or isinstance(grad, Unread)):
            return IMPURE
        if _forgotten(grad):
            return UNUSED
        return self._factors(Pass(self.forms, lambda _: None, calls={bucket.index: calls}), bucket)


def _forgotten(grad: Tensor | None) -> bool:
    return grad is None or (isinstance(grad, Unread) and grad.cleared)


class Fused:
    """The weights of ``module`` that `DistributedDataParallel` leaves to the optimizer's step."""

    def __init__(self, module: nn.Module):
        self.recording = _Recording(module)
        self.buckets = [bucket for bucket in self.recording.buckets if bucket.linear]
        self.names = [bucket.names[0] for bucket in self.buckets]
        self.weights = [self.recording.parameters[name] for name in self.names]
        for weight in self.weights:
            if type(weight) is not nn.Parameter or weight.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{VARIABLE}={FUSED} is for 32 and 64 bits, and there is a weight of {weight.dtype}")

    @contextlib.contextmanager
    def kept_out(self, module: nn.Module) -> Iterator[None]:
        """Of the buckets of torch's class, which is made meanwhile."""
        name = "_ddp_params_and_buffers_to_ignore"
        before = getattr(module, name, None)
        setattr(module, name, [*(before or ()), *self.names])
        try:
            yield
        except BaseException:
            self.recording.close()
            raise
        finally:
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)

    def begin(self, group: Any) -> None:
        """Every rank gets the weights of the first, as torch's class does with all others."""
        self.group, self.size = group, dist.get_world_size(group)
        for weight in self.weights:
            dist.broadcast(weight.data, dist.get_global_rank(group, 0), group)
        _watch_steps()
        _alive.add(self)
        if dist.get_rank(group) == 0:
            log.info(
                f"DistributedDataParallel: the optimizer's step takes {len(self.names)} weights' gradients as factors "
                f"({VARIABLE}={FUSED}); their .grad cannot be read"
            )

    def forward(self, uneven: bool) -> contextlib.AbstractContextManager[None]:
        if uneven:
            raise ValueError(f"{VARIABLE}={FUSED} is not for join() of uneven inputs; {WITHOUT}")
        return self.recording.forward()

    def step(self, optimizer: Optimizer, closure: bool) -> None:
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        own = [i for i, weight in enumerate(self.weights) if id(weight) in groups]
        if not own:
            return
        if closure or not optimizer_takes_factors(optimizer):
            raise ValueError(
                f"{VARIABLE}={FUSED} is for torch.optim.SGD without closure and hooks; this one is "
                f"{type(optimizer).__name__}; {WITHOUT}"
            )
        found = {i: self.recording.since_step(self.buckets[i]) for i in own}
        rows = self._agreed(found)
        for i in own:
            if rows[i] == UNUSED:
                continue
            gradient, weight = found[i], self.weights[i]
            both = _sides(gradient, weight)
            if rows[i] * self.size * sum(weight.shape) > 2 * weight.numel():
                weight.grad = (both[0].T @ both[1]).div_(self.size)
                dist.all_reduce(weight.grad, group=self.group)
            else:
                left, right = (self._gathered(side, rows[i]) for side in both)
                state, group = optimizer.state[weight], groups[id(weight)]
                step_factored(Factored(weight, left.div_(self.size), right), state, group, 1.0)

    def _agreed(self, found: dict[int, Gradient | int]) -> list[int]:
        """The most rows that any rank has of each weight. Raises where a rank cannot go on, on all ranks."""
        own = [UNUSED] * len(self.weights)
        for i, one in found.items():
            own[i] = one if isinstance(one, int) else len(_sides(one, self.weights[i])[0])
        marks = [checksum(weight.detach()) for weight in self.weights]
        headers = [torch.empty(2 * len(own), dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(headers, torch.tensor([*own, *marks]), group=self.group)
        everyone = torch.stack(headers)[:, : len(own)]
        if bool((torch.stack(headers)[:, len(own) :] != torch.tensor(marks)).any()):
            raise RuntimeError(f"{VARIABLE}={FUSED}: the ranks' weights differ, as on unlike processors; {WITHOUT}")
        impure = [self.names[i] for i in range(len(own)) if bool((everyone[:, i] == IMPURE).any())]
        if impure:
            raise RuntimeError(
                f"{VARIABLE}={FUSED}: {', '.join(impure)} got a gradient that is not its layer's alone (a penalty, "
                f"checkpointing, a hook, a call of the module itself, a second backward pass); {WITHOUT}"
            )
        most: list[int] = everyone.amax(0).tolist()
        return most

    def _gathered(self, own: Tensor, rows: int) -> Tensor:
        """All ranks' rows, one below the other; those of ranks with fewer are padded with zeros."""
        padded = own.new_zeros(rows, own.shape[1])
        padded[: len(own)] = own
        everyone = own.new_empty(self.size * rows, own.shape[1])
        dist.all_gather(list(everyone.split(rows)), padded, group=self.group)  # type: ignore[no-untyped-call]
        return everyone


def _sides(gradient: Gradient | int, weight: Tensor) -> Sequence[Tensor]:
    if isinstance(gradient, int):
        return [weight.new_zeros(0, side) for side in weight.shape]
    assert gradient.output_grad is not None
    assert gradient.layer_input is not None
    return gradient.output_grad, gradient.layer_input


def wanted(module: nn.Module, compiled: bool) -> Fused | None:
    """If the variable asks for it, and there is a weight that it is for. Raises ValueError where it cannot be had."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", FUSED):
        raise ValueError(f"{VARIABLE} is {FUSED!r} or not set, not {asked!r}")
    if not asked or not dist.is_initialized():
        return None
    if compiled:
        raise ValueError(f"{VARIABLE}={FUSED} is not for a compiled model; {WITHOUT}")
    made = Fused(module)
    return made if made.weights and len(made.weights) < len(made.recording.parameters) else None


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


@torch.no_grad()
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for each in list(_alive):
        each.step(optimizer, bool(args[1:] or kwargs.get("closure")))
