"""SGD from factors: the gradient of a large fully-connected weight is never computed. By PACELINE_DDP_OPTIMIZER=fused.

    forward, backward    of each such layer: its input and the gradient of its output are kept, a row for each sample,
                         and an all-gather of all ranks' rows begins (`paceline.ddp.sums.early`)
    optimizer.step()     first: each rank adds the product of these rows to the momentum
    .grad                has the rows and no values. Cleared, it has none; to whoever reads it, an error

Only a script that leaves `.grad` alone between backward and step can have it, which nobody can see: so it is asked for.
Rows that are more bytes than their product are multiplied, and the sum of the products begins in backward.

*Invariants*: torch's class with the same SGD, up to the order of sums; replicas bit-equal, or an error.
*Source*: sufficient factors: Xie et al. 2016 (UAI); into the momentum: `engine/compute/optimizer_step.py`.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.ddp.import_hook import FUSED, OPTIMIZER
from paceline.ddp.sums.bucket_sums import checksum
from paceline.ddp.sums.early import WHOLE, EarlySums, Own
from paceline.ddp.sums.factors import saved_elsewhere
from paceline.ddp.sums.lane import Lane
from paceline.engine.compute.batch import leaves
from paceline.engine.compute.gradient_hooks import Backward, Call, Pass
from paceline.engine.compute.optimizer_step import Factored, optimizer_takes_factors, step_factored
from paceline.messages import FACTORS, Bucket
from paceline.report.log import log

dist: Any = torch.distributed  # its stubs leave out what we use

ASKED = f"{OPTIMIZER}={FUSED}"
WITHOUT = f"without {ASKED} this script runs as it is"
UNUSED, IMPURE = -1, -2  # instead of a number of rows
IGNORED = "_ddp_params_and_buffers_to_ignore"  # by torch's class

_made: list[weakref.ref[Fused]] = []  # in the same order on all ranks


class Unread(Tensor):
    """In the place of a gradient that is not computed: the rows of which it is the product, or what a step has used."""

    name = ""
    calls: list[Call]
    dense: Tensor | None = None  # of rows that were more
    taken = False  # by a step

    @property
    def parts(self) -> list[object]:
        return [*self.calls, *([] if self.dense is None else [self.dense])]

    @classmethod
    def of(cls, name: str, weight: Tensor) -> Unread:
        made: Unread = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        made.name, made.calls = name, []
        return made

    def clear(self) -> None:
        self.calls, self.dense, self.taken = [], None, False

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default):
            for each in leaves(args):
                if isinstance(each, cls):
                    each.clear()
                else:
                    each.zero_()
            return args[0] if func is torch.ops.aten.zero_.default else None
        name = next(each.name for each in leaves((args, kwargs)) if isinstance(each, cls))
        raise RuntimeError(
            f"{ASKED}: the gradient of {name!r} is not computed, and {func} uses it (of clipping, a scaler, "
            f"a look at .grad, a penalty on the weight); {WITHOUT}"
        )


class _Rows(Pass):
    """Of one forward: its calls end with its graph where nobody goes backward through it."""

    def __init__(self, forms: Sequence[str], recording: _Recording, whole: bool):
        super().__init__(forms, lambda _: None)
        self.recording, self.whole = recording, whole

    def wanted(self, call: Call) -> None:
        self.recording.keep(call, self.whole)


class _Recording(Backward):
    """Adds the rows of each layer to what is in the place of its gradient."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.watch(early=False)
        self.close()  # hooks are there in a forward pass alone: a module that is copied or saved has none
        self.forms = [FACTORS if bucket.linear else "" for bucket in self.buckets]
        self.impure = set[int]()
        self.kept: Callable[[Unread], None] = lambda grad: None  # called in a pass that is to be summed

    @contextlib.contextmanager
    def forward(self, whole: bool) -> Iterator[None]:
        state = self._pass = _Rows(self.forms, self, whole)
        self.attach()
        try:
            yield
        finally:
            self.close()
            self._pass, state.own_pass = None, True
            for index in state.hidden:  # of layers that an error has interrupted
                self.parameters[self.buckets[index].names[0]].requires_grad_(True)

    def _enter(self, bucket: Bucket, module: nn.Linear) -> None:
        if not saved_elsewhere():  # what is computed again in backward is computed with the weight in the graph
            super()._enter(bucket, module)

    def _record(self, state: Pass, bucket: Bucket, call: Call, left: Tensor) -> None:
        super()._record(state, bucket, call, left)
        self.impure |= state.impure_factors

    def keep(self, call: Call, whole: bool) -> None:
        """``whole``: the gradient is to be summed after this backward pass."""
        bucket = self.buckets[call.index]
        name, weight = bucket.names[0], self.parameters[bucket.names[0]]
        if weight.grad is None:
            weight.grad = Unread.of(name, weight)
        grad = weight.grad
        if not isinstance(grad, Unread):
            self.impure.add(call.index)
            return
        if grad.taken:
            raise RuntimeError(
                f"{ASKED}: the gradient of {name!r} was used by optimizer.step() and not cleared before the "
                f"next backward pass, which would add to it; call zero_grad() in every step; {WITHOUT}"
            )
        grad.calls.append(call)
        kept = sum(each.numel() for one in grad.calls for each in (one.left, one.right) if each is not None)
        if kept > weight.numel():  # one gradient takes less memory
            grad.dense, grad.calls = self.whole(grad), []
        if whole:
            self.kept(grad)

    def whole(self, grad: Unread) -> Tensor:
        """A tensor of its own: to what is summed already nothing is added."""
        left, right = self.sides(grad)
        product = left.T @ right
        return product if grad.dense is None else product.add_(grad.dense)

    def sides(self, grad: Unread) -> tuple[Tensor, Tensor]:
        """(left, right), a row each, of what is not in ``dense``."""
        bucket = next(each for each in self.buckets if each.names[0] == grad.name)
        gradient = self._factors(Pass(self.forms, lambda _: None, calls={bucket.index: grad.calls}), bucket)
        assert gradient.output_grad is not None
        assert gradient.layer_input is not None
        return gradient.output_grad, gradient.layer_input


class Fused:
    """The weights of ``module`` that `DistributedDataParallel` leaves to the optimizer's step."""

    def __init__(self, module: nn.Module):
        self.recording, ignored = _Recording(module), getattr(module, IGNORED, None) or ()
        self.buckets = [each for each in self.recording.buckets if each.linear and each.names[0] not in ignored]
        self.names = [bucket.names[0] for bucket in self.buckets]
        self.recording.forms = [FACTORS if each in self.buckets else "" for each in self.recording.buckets]
        self.weights = [self.recording.parameters[name] for name in self.names]
        self.lane: Lane | None = None
        self.early: EarlySums | None = None
        self._stepped: list[int] = []  # weights whose gradient the optimizer uses at the moment
        for weight in self.weights:
            if type(weight) is not nn.Parameter or weight.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{ASKED} is for 32 and 64 bits, and there is a weight of {weight.dtype}")
            if weight.device.type != "cpu":
                raise ValueError(f"{ASKED} is for CPUs, and there is a weight on {weight.device}; {WITHOUT}")

    @contextlib.contextmanager
    def kept_out(self, module: nn.Module) -> Iterator[None]:
        """Of the buckets of torch's class, which is made meanwhile."""
        before = getattr(module, IGNORED, None)
        # of a layer that is the whole module torch's class knows the weight as ".weight"
        setattr(module, IGNORED, [*(before or ()), *self.names, *(f".{name}" for name in self.names)])
        try:
            yield
        finally:
            if before is None:
                delattr(module, IGNORED)
            else:
                setattr(module, IGNORED, before)

    def begin(self, group: Any, sums: Lane | None, on_cpus: bool) -> None:
        """Every rank gets the weights of the first, as torch's class does with all others. ``sums``: the lane of all
        other gradients, None for one rank. ``on_cpus``: the group's backend is one for CPUs."""
        if not on_cpus:
            raise ValueError(f"{ASKED} is not for backend {dist.get_backend(group)!r}; {WITHOUT}")
        others = [other for ref in _made if (other := ref())]
        if any(weight is one for other in others for one in other.weights for weight in self.weights):
            raise ValueError(f"{ASKED}: a weight of this module is in a wrapper already; {WITHOUT}")
        self.group, self.size = group, dist.get_world_size(group)
        if sums:  # they begin in the order of buckets, however these and the layers follow each other on a rank
            self.lane, self.sums = sums.beside(), sums
            self.early = EarlySums(self.lane, len(self.weights), self._pays)
            self.recording.kept = self._kept
        for weight in self.weights:
            dist.broadcast(weight.data, dist.get_global_rank(group, 0), group)
        _watch_steps()
        _made[:] = [*map(weakref.ref, others), weakref.ref(self)]
        if dist.get_rank(group) == 0:
            log.info(
                f"DistributedDataParallel: the optimizer's step takes {len(self.names)} weights' gradients as factors "
                f"({ASKED}); their .grad cannot be read"
            )

    def forward(self, uneven: bool, whole: bool) -> contextlib.AbstractContextManager[None]:
        if uneven:
            raise ValueError(f"{ASKED} is not for join() of uneven inputs; {WITHOUT}")
        return self.recording.forward(whole)

    def _pays(self, i: int, rows: int) -> bool:
        weight = self.weights[i]
        return bool(rows * self.size * sum(weight.shape) <= 2 * weight.numel())

    def _kept(self, grad: Unread) -> None:
        assert self.early
        i = self.names.index(grad.name)
        self.early.ready(i, lambda: self._own(i, grad))

    def _own(self, i: int, grad: Unread) -> Own:
        left, right = self.recording.sides(grad)
        if grad.dense is None and self._pays(i, len(left)):
            return Own(grad.parts, (left.clone(), right.clone()))
        return Own(grad.parts, self.recording.whole(grad))

    def step(self, optimizer: Optimizer, closure: bool) -> None:
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        own = [i for i, weight in enumerate(self.weights) if id(weight) in groups]
        if not own:
            return
        if closure or not optimizer_takes_factors(optimizer):
            raise ValueError(
                f"{ASKED} is for torch.optim.SGD without closure and hooks; this one is "
                f"{type(optimizer).__name__}; {WITHOUT}"
            )
        if self.early:
            self.early.close_round()
        rows, states = self._agreed({i: self._rows(i) for i in own})
        summed = self.early.take(own, states) if self.early else {}
        for i in own:
            weight = self.weights[i]
            grad, weight.grad = weight.grad, None
            if rows[i] == UNUSED:
                continue
            self._stepped.append(i)
            grad = grad if isinstance(grad, Unread) else Unread.of(self.names[i], weight)
            total = summed.get(i)
            if isinstance(total, Tensor):
                weight.grad = total
                continue
            if not rows[i] or not self._pays(i, rows[i]):
                weight.grad = self.recording.whole(grad)
                if rows[i]:
                    dist.all_reduce(weight.grad.div_(self.size), group=self.group)
                continue
            left, right = total or self.recording.sides(grad)
            if self.lane and not total:
                left, right = self.lane.submit(self.lane.rows, (left, right), [rows[i]] * 2).result()
            step_factored(
                Factored(weight, left.div_(self.size), right), optimizer.state[weight], groups[id(weight)], 1.0
            )
            torch.autograd.graph.increment_version(weight)

    def stepped(self) -> None:
        """Until they are cleared, nobody may take these gradients for others."""
        for i in self._stepped:
            grad = self.weights[i].grad = Unread.of(self.names[i], self.weights[i])
            grad.taken = True
        self._stepped = []

    def _rows(self, i: int) -> int:
        grad = self.weights[i].grad
        if self.buckets[i].index in self.recording.impure or not (grad is None or isinstance(grad, Unread)):
            return IMPURE
        if grad is None:
            return UNUSED
        if grad.taken:
            raise RuntimeError(
                f"{ASKED}: optimizer.step() was called twice for one gradient of {grad.name!r}; {WITHOUT}"
            )
        return WHOLE if grad.dense is not None else len(self.recording.sides(grad)[0])

    def _agreed(self, found: dict[int, int]) -> tuple[list[int], list[list[int]]]:
        """(the most rows that any rank has of each weight, each rank's states of the early sums). Raises where a
        rank cannot go on, on all ranks."""
        own = [found.get(i, UNUSED) for i in range(len(self.weights))]
        states = [self._state(i) for i in range(len(own))]
        marks = [checksum(weight.detach()) for weight in self.weights]
        rate = self.lane.rate if self.lane else 0
        headers = [torch.empty(3 * len(own) + 1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(headers, torch.tensor([*own, *marks, *states, rate]), group=self.group)
        columns = torch.stack(headers)
        everyone, theirs, begun, rates = columns.split([len(own)] * 3 + [1], 1)  # type: ignore[no-untyped-call]
        if self.lane:
            self.lane.packed = self.sums.packed = self.lane.slow(int(rates.min()))
        if bool((theirs != torch.tensor(marks)).any()):
            raise RuntimeError(f"{ASKED}: the ranks' weights differ, as on unlike processors; {WITHOUT}")
        impure = [self.names[i] for i in range(len(own)) if bool((everyone[:, i] == IMPURE).any())]
        if impure:
            raise RuntimeError(
                f"{ASKED}: {', '.join(impure)} got a gradient that is not its layer's alone (a penalty, "
                f"checkpointing, a hook, a call of the module itself, a second backward pass); {WITHOUT}"
            )
        most: list[int] = everyone.amax(0).tolist()
        return most, begun.tolist()

    def _state(self, i: int) -> int:
        grad = self.weights[i].grad
        return self.early.state(i, grad.parts if isinstance(grad, Unread) else ()) if self.early else 0


def wanted(module: nn.Module, compiled: bool) -> Fused | None:
    """If the variable asks for it, and there is a weight that it is for. Raises ValueError where it cannot be had."""
    asked = os.environ.get(OPTIMIZER, "")
    if asked not in ("", FUSED):
        raise ValueError(f"{OPTIMIZER} is {FUSED!r} or not set, not {asked!r}")
    if not asked or not dist.is_initialized():
        return None
    if compiled:
        raise ValueError(f"{ASKED} is not for a compiled model; {WITHOUT}")
    made = Fused(module)
    if made.weights and len(made.weights) < len(made.recording.parameters):
        return made
    if dist.get_rank() == 0:
        log.info(f"DistributedDataParallel: {ASKED} has no effect: there is no weight that it is for, or no other")
    return None


def refuse_hooks(made: Fused | None) -> None:
    """Communication hooks would see the other gradients alone."""
    if made:
        raise ValueError(f"{ASKED} is not for communication hooks, nor for another group; {WITHOUT}")


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@torch.no_grad()
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    closure = any(each is not None for each in (*args[1:], kwargs.get("closure")))
    for ref in _made:
        if each := ref():
            each.step(optimizer, closure)


def _after_step(*_: Any) -> None:
    for ref in _made:
        if each := ref():
            each.stepped()
