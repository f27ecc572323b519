"""Gradient hooks: a backward pass bucket by bucket; which parameters share a bucket, when it is ready, in which form.

A fully-connected layer's weight gradient is ``left.T @ right``: left is the gradient of the layer's
output, right its input, one row per sample. In the FACTORS form the weight is kept out of its module's
graph, so autograd never computes that product, and hooks record both factors instead. If such a weight
gets a gradient all the same, it comes from another use (tied, functional, in the loss). Then the factors
are not the whole gradient: the vote reports this, and the step is retried with the weight DENSE.
Where forward or loss itself computes a gradient of such a weight, it gets the product.

*Source*: factors as messages: Xie et al. 2016 (UAI); Zhang et al. 2017 (arXiv 1706.03292), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from paceline.engine.checks import loss_graph
from paceline.engine.compute.matmul import has_own_forward
from paceline.messages import FACTORS, Bucket, Gradient

ALONE_BYTES = 1 << 20  # a parameter this large has its own bucket
LINEAR_BYTES = 1 << 16  # so has a fully-connected weight this large, since it may be sent as factors
BUCKET_BYTES = 4 << 20


def _only_looks(hook: Any) -> bool:
    """Whether the hook is torch's own, such as a module tracker: these change no output."""
    return (getattr(hook, "__module__", None) or "").startswith("torch.")


def _is_linear(module: nn.Module) -> bool:
    """Whether it computes as nn.Linear does: neither its class nor the object itself has another forward."""
    # of a scripted module the class has no forward that could be asked for
    linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return linear and not has_own_forward(module)


def cut(
    model: nn.Module, find_linear: bool = True, least_bytes: tuple[float, float] = (0, 0)
) -> tuple[tuple[Bucket, ...], dict[str, list[nn.Linear]]]:
    """Buckets in backward order, and the modules of each weight that may be sent as factors. ``least_bytes``: of a
    bucket, and of such a weight, where that is more than usual."""
    least, least_linear = least_bytes
    linears: dict[int, list[nn.Linear]] = {}
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        if _is_linear(module) and "weight" in module._parameters:
            linears.setdefault(id(module.weight), []).append(module)  # type: ignore[arg-type]
    buckets: list[tuple[list[tuple[str, Tensor]], bool]] = []
    open_buckets: dict[torch.dtype, list[tuple[str, Tensor]]] = {}  # the same on nodes with a device or with several
    factored: dict[str, list[nn.Linear]] = {}
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, parameter in reversed(trainable):
        own = find_linear and id(parameter) in linears and uses[id(parameter)] == 1 and not parameter.is_complex()
        if own and parameter.nbytes >= max(LINEAR_BYTES, least_linear):
            factored[name] = linears[id(parameter)]
            buckets.append(([(name, parameter)], True))
        elif parameter.nbytes >= max(ALONE_BYTES, least):
            buckets.append(([(name, parameter)], False))
        else:
            bucket = open_buckets.setdefault(parameter.dtype, [])
            bucket.append((name, parameter))
            if sum(p.nbytes for _, p in bucket) >= max(BUCKET_BYTES, least):
                buckets.append((open_buckets.pop(parameter.dtype), False))
    buckets += [(bucket, False) for bucket in open_buckets.values()]
    return tuple(
        Bucket(index, tuple(n for n, _ in group), tuple(tuple(p.shape) for _, p in group), linear)
        for index, (group, linear) in enumerate(buckets)
    ), factored


@dataclass
class Call:
    """One use of a fully-connected layer in this step. ``index``: of its bucket."""

    index: int
    right: Tensor
    version: int
    left: Tensor | None = None


class _Nothing(torch.autograd.Function):
    """Minus zero, as a function of a weight that was out of the graph: connects the layer's output to it again."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, nothing: Tensor, shape: torch.Size, call: Call, state: Pass) -> Tensor:
        ctx.call, ctx.state, ctx.like = call, state, weight.dtype
        return nothing.expand(shape)

    @staticmethod
    def backward(ctx: Any, *lefts: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        """None in the step's own pass, in which hooks record the factors. Where nobody asks for the weight's gradient,
        it is not called."""
        if ctx.state.is_own():
            ctx.state.wanted(ctx.call)
            return None, None, None, None, None
        left, right = (each.reshape(-1, each.shape[-1]).to(ctx.like) for each in (*lefts, ctx.call.right))
        return left.T @ right, None, None, None, None


@dataclass
class Pass:
    """The state of one backward pass."""

    forms: Sequence[str]
    offer: Callable[[Gradient], None]
    ready: dict[int, set[str]] = field(default_factory=dict)
    calls: dict[int, list[Call]] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    offered: set[int] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    impure_factors: set[int] = field(default_factory=set)
    hidden: set[int] = field(default_factory=set)  # weights that are kept out of the graph at the moment
    later: set[int] = field(default_factory=set)  # buckets that are offered after all passes
    last: bool = False  # the last micro-batch: complete buckets are offered now
    places: set[int] = field(default_factory=set)  # addresses of the parameters' memory, once needed
    own_pass: bool = False  # backward is the step's own, and not one inside its forward or loss
    concurrent: bool = False  # several micro-batches at once: each gradient has its own memory from the first on

    def is_own(self) -> bool:
        """Whether the backward pass that calls this is the step's own."""
        return self.own_pass

    def wanted(self, call: Call) -> None:
        """Autograd asks for the weight's gradient of this use, not only for one of the layer's input."""

    def hide(self, index: int, module: nn.Linear) -> None:
        """Keeps the weight of this bucket out of the graph of its layer's forward."""
        module.weight.requires_grad_(False)
        self.hidden.add(index)

    def show(self, index: int, module: nn.Linear) -> bool:
        """Ends `hide`. False if it was not hidden."""
        if hidden := index in self.hidden:
            self.hidden.discard(index)
            module.weight.requires_grad_(True)
        return hidden


def _uses(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


@cache
def _own_uses() -> tuple[int, int]:
    """The use counts of a gradient's memory that no other tensor uses: after the passes, and within a hook."""
    leaf, seen = torch.zeros(1, requires_grad=True), list[int]()
    leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(_uses(leaf.grad)))  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        (leaf * leaf).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return _uses(leaf.grad), seen[0]


def _shared(grad: Tensor, early: bool) -> bool:
    """Whether other tensors share its memory: of ``x + bias`` with one row, both gradients are one tensor."""
    return _uses(grad) > _own_uses()[early]


class Backward:
    """Hooks on a model that turn each of its backward passes into gradients by bucket."""

    def __init__(self, model: nn.Module, hook_layers: bool = True, least_bytes: tuple[float, float] = (0, 0)):
        """``hook_layers``: record the factors of fully-connected layers; not for a compiled model."""
        _own_uses()  # cached here: within a backward pass it cannot be measured
        self.buckets, factored = cut(model, hook_layers, least_bytes)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names = tuple(name for bucket in self.buckets for name in bucket.names)
        self._pass: Pass | None = None
        self._nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._checked = self._late = False  # late: buckets are offered after all passes, where backward is reentrant
        self.rounded = False  # autocast to 16 bits, except where a model disables it
        self._hooks: list[Any] = []
        self._watches: dict[str, Any] = {}
        self._hook_ids: dict[nn.Module, int] = {}  # of this object's forward hook, by layer
        self._factored = factored
        self.watch()
        self.attach()

    def attach(self) -> None:
        """Hooks the fully-connected layers; `close` removes them."""
        for bucket in self.buckets:
            for module in self._factored.get(bucket.names[0], ()):
                self._hooks.append(
                    module.register_forward_pre_hook(lambda module, _, bucket=bucket: self._enter(bucket, module))
                )
                self._hooks.append(
                    module.register_forward_hook(
                        lambda module, args, kwargs, output, bucket=bucket: self._leave(
                            bucket, module, args[0] if args else kwargs["input"], output
                        ),
                        with_kwargs=True,
                        always_call=True,
                        prepend=True,  # before a user's hook, which may change the output
                    )
                )
                self._hook_ids[module] = self._hooks[-1].id

    def watch(self, early: bool = True) -> None:
        """``early``: offers buckets as soon as they are complete. On one node alone, at the end is cheaper."""
        for hook in self._watches.values():
            hook.remove()
        self._watches = {
            name: self.parameters[name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, bucket=bucket, name=name: self._ready(bucket, name)
            )
            for bucket in self.buckets
            for name in bucket.names
            if early
        }

    def close(self) -> None:
        for hook in (*self._hooks, *self._watches.values()):
            hook.remove()
        self._hooks = []

    def run(
        self, forms: Sequence[str], offer: Callable[[Gradient], None], *computes: Callable[[], Tensor | None]
    ) -> Pass:
        """Calls each of ``computes`` for a scalar to differentiate (None: no rows); offers every bucket's sum once."""
        for parameter in self.parameters.values():
            parameter.grad = None
        state = self._pass = Pass(forms, offer)
        try:
            for i, compute in enumerate(computes):
                state.last = i == len(computes) - 1
                if (scalar := compute()) is not None and scalar.requires_grad:
                    self._check(scalar)
                    state.own_pass = True
                    scalar.backward()  # type: ignore[no-untyped-call]
                    state.own_pass = False
                    if not state.last:
                        self._unshare(*self.parameters)
        finally:
            self._pass = None
            for index in state.hidden:  # of layers that a Ctrl-C has interrupted: torch does not run their hooks
                self.parameters[self.buckets[index].names[0]].requires_grad_(True)
        return self._offer_rest(state)

    def _check(self, scalar: Tensor) -> None:
        """Checks the graph of the first step."""
        if not self._checked:
            loss_graph.refuse_scaled(scalar)
            self._checked, self._late = True, loss_graph.is_reentrant(scalar)

    def _unshare(self, *names: str) -> None:
        """Clones gradients that share memory: the next micro-batch would add to such memory twice."""
        early = self._pass is not None and self._pass.concurrent  # called within a hook
        for parameter in map(self.parameters.__getitem__, names):
            if parameter.grad is not None and parameter.grad.layout == torch.strided and _shared(parameter.grad, early):
                parameter.grad = parameter.grad.clone()

    def take(self, forms: Sequence[str], offer: Callable[[Gradient], None]) -> Pass:
        """Offers every ``.grad``, dense: buckets for which factors were expected are reported as impure."""
        state = Pass(forms, offer, impure_factors={i for i, form in enumerate(forms) if form == FACTORS})
        return self._offer_rest(state)

    def _offer_rest(self, state: Pass) -> Pass:
        for bucket in self.buckets:
            if state.forms[bucket.index] == FACTORS and self.parameters[bucket.names[0]].grad is not None:
                state.impure_factors.add(bucket.index)
            if bucket.index not in state.offered:
                self._emit(state, bucket)
        return state

    def _enter(self, bucket: Bucket, module: nn.Linear) -> None:
        weight, state = module.weight, self._pass
        if state is None:
            return
        hooked = weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) > bool(self._watches)
        # dense where factors are not safe: a user's hook needs the weight's gradient, another forward computes it
        # differently, functional_call replaces the weight, or a functorch transform the tensors
        own = hooked or has_own_forward(module) or weight is not self.parameters[bucket.names[0]]
        own = own or torch._C._are_functorch_transforms_active()
        # a forward hook that was registered before this object's may replace the layer's output
        own = own or next(iter(module._forward_hooks), None) != self._hook_ids.get(module, -1)
        own = own or not all(map(_only_looks, _global_forward_hooks.values()))
        # factors are sent in 16 bits, which is exact only for layers that compute in 16 bits
        own = own or (self.rounded and not torch.is_autocast_enabled(weight.device.type))
        if state.forms[bucket.index] == FACTORS and weight.requires_grad and not own:
            state.hide(bucket.index, module)

    def _leave(self, bucket: Bucket, module: nn.Linear, right: Tensor, output: Tensor | None) -> Tensor | None:
        state, weight = self._pass, module.weight
        if state is None:
            return None
        hidden = state.show(bucket.index, module)
        if output is None or not torch.is_grad_enabled() or not weight.requires_grad:
            return None
        if not hidden:
            if output.requires_grad:
                state.rows[bucket.index] = state.rows.get(bucket.index, 0) + right[..., 0].numel()
            return None
        call = Call(bucket.index, right.detach(), right._version)
        kind = output.dtype, output.device
        if (nothing := self._nothing.get(kind)) is None:  # adding it changes no value, not even -0.0
            nothing = self._nothing[kind] = output.detach().new_full((), -0.0)
        output = output + _Nothing.apply(weight, nothing, output.shape, call, state)  # type: ignore[no-untyped-call]
        state.calls.setdefault(bucket.index, []).append(call)
        output.register_hook(lambda left: self._record(state, bucket, call, left))
        return output

    def _record(self, state: Pass, bucket: Bucket, call: Call, left: Tensor) -> None:
        if not state.is_own() or call.left is not None:
            # a gradient inside forward or loss is not the step's; one that is differentiated again needs its graph
            if call.left is not None or torch.is_grad_enabled():
                state.impure_factors.add(bucket.index)
            return
        if call.right._version != call.version:
            raise RuntimeError(
                f"the input of the layer with {bucket.names[0]!r} was changed in place after the layer had read "
                f"it (version {call.right._version}, read at {call.version}); clone it or change it out of place"
            )
        call.left = left.detach()
        if not state.last:  # the next micro-batch may overwrite both: in a parameter's .grad, in the same input
            call.left, call.right = call.left.clone(), call.right.clone()
        calls = state.calls[bucket.index]
        if state.last and not self._late and all(c.left is not None for c in calls):
            self._emit(state, bucket)

    def _ready(self, bucket: Bucket, name: str) -> None:
        state = self._pass
        if state is None:
            return
        if state.forms[bucket.index] == FACTORS:
            if self.parameters[name].grad is not None:
                state.impure_factors.add(bucket.index)
            return
        if state.concurrent:
            self._unshare(name)
        if not state.last or self._late:
            return
        ready = state.ready.setdefault(bucket.index, set())
        if name in ready:
            raise RuntimeError(
                f"parameter {name!r} got its gradient twice in one step; with activation checkpointing pass "
                f"use_reentrant=False"
            )
        ready.add(name)
        if next(reversed(self.parameters[name]._post_accumulate_grad_hooks)) != self._watches[name].id:
            state.later.add(bucket.index)  # a later hook may still change it
        if len(ready) == len(bucket.names) and bucket.index not in state.later:
            self._emit(state, bucket, early=True)

    def _emit(self, state: Pass, bucket: Bucket, early: bool = False) -> None:
        if bucket.index in state.offered:
            raise RuntimeError(f"{bucket.names} were used again after their gradient was complete")
        state.offered.add(bucket.index)
        if state.forms[bucket.index] == FACTORS:
            state.offer(self._factors(state, bucket))
            return
        grads = [self._grad(name) for name in bucket.names]
        if len(grads) == 1 and grads[0] is not None and _shared(grads[0], early):
            grads = [grads[0].clone()]  # it is added up in place, while other tensors still read this memory
        state.used.update(name for name, grad in zip(bucket.names, grads, strict=True) if grad is not None)
        whole = [
            torch.zeros_like(self.parameters[name], requires_grad=False) if grad is None else grad
            for name, grad in zip(bucket.names, grads, strict=True)
        ]
        state.offer(Gradient(bucket, grads=whole))

    def _grad(self, name: str) -> Tensor | None:
        grad = self.parameters[name].grad
        return grad.to_dense() if grad is not None and grad.layout != torch.strided else grad

    def _detached(self, state: Pass, right: Tensor) -> Tensor:
        """A copy of an input that shares memory with a parameter, which the update changes; else the input itself."""
        if not state.places:
            state.places = {each.untyped_storage().data_ptr() for each in self.parameters.values()}
        return right.clone() if right.untyped_storage().data_ptr() in state.places else right

    def _factors(self, state: Pass, bucket: Bucket) -> Gradient:
        out_features, in_features = bucket.shapes[0]
        calls = [call for call in state.calls.get(bucket.index, ()) if call.left is not None]
        weight = self.parameters[bucket.names[0]]
        if not calls:
            none = weight.new_zeros(0, out_features), weight.new_zeros(0, in_features)
            return Gradient(bucket, output_grad=none[0], layer_input=none[1])
        state.used.update(bucket.names)
        # (..., out) -> (rows, out); (..., in) -> (rows, in)
        # with autocast they have 16 bits or mixed types; the weight's gradient has the weight's type
        left = [call.left.reshape(-1, out_features).to(weight.dtype) for call in calls if call.left is not None]
        right = [self._detached(state, call.right).reshape(-1, in_features).to(weight.dtype) for call in calls]
        state.rows[bucket.index] = sum(len(part) for part in left)
        if len(calls) == 1:
            return Gradient(bucket, output_grad=left[0], layer_input=right[0])
        return Gradient(bucket, output_grad=torch.cat(left), layer_input=torch.cat(right))
