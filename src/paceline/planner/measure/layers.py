"""Layer timer: forward and backward of every layer by itself, on the inputs that it had in the model.

A layer is a module whose forward calls no other module. Equal layers with equal inputs are timed once. Each pass times
all layers in turn, so that every layer finds the CPU caches as in a training step.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Call:
    """``count`` equal calls of a layer. ``weights``: what backward differentiates besides the inputs."""

    module: nn.Module
    inputs: list[Any]
    tree: Any
    weights: list[Tensor]
    count: int = 1
    clones: bool = False  # the layer changes its input in place, which autograd forbids for leaves


def activation_bytes(forward: Callable[[], Any], weights: Sequence[Tensor]) -> int:
    """Bytes that ``forward`` keeps for its backward pass, beside the weights; 0 where that cannot be seen."""
    known = {each.untyped_storage().data_ptr() for each in weights}
    found: dict[
        int, tuple[int, dict[Any, int]]
    ] = {}  # by storage: its bytes, and those of each part of it that is kept

    def keep(value: Tensor) -> Tensor:
        if value.layout == torch.strided and (storage := value.untyped_storage()).data_ptr() not in known:
            _, parts = found.setdefault(storage.data_ptr(), (storage.nbytes(), {}))
            parts[value.storage_offset(), value.shape, value.stride()] = value.nbytes
        return value

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            output = forward()  # noqa: F841 kept, so that no memory is used twice
    except RuntimeError:
        return 0
    return sum(min(whole, sum(parts.values())) for whole, parts in found.values())


class LayerTimer:
    """The layer calls of one forward pass. ``absorbed``: ids of weights whose update uses factors, not gradients."""

    def __init__(self, model: nn.Module, forward: Callable[[], Any], words: Sequence[str], absorbed: set[int]):
        self.words, self.absorbed = words, absorbed
        try:
            nothing = torch.empty(0)  # kept instead of every activation
            with torch.autograd.graph.saved_tensors_hooks(lambda _: nothing, lambda value: value):
                self._watch(model, forward)
        except Exception:  # a forward that differentiates
            self._watch(model, forward)

    def _watch(self, model: nn.Module, forward: Callable[[], Any]) -> None:
        self.calls: list[Call] = []
        self.num_calls = 0
        self.order: list[int] = []  # in which they are called
        self.rows: dict[int, int] = {}  # rows of each fully-connected weight's factors, by its id
        self._index: dict[Any, int] = {}
        self._depth: list[bool] = []  # per active module call: whether it called another module
        handles: list[Any] = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))
        self._arguments: list[tuple[list[Any], Any]] = []
        try:
            forward()
        finally:
            for handle in handles:
                handle.remove()
        self._index.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._depth:
            self._depth[-1] = True
        self._depth.append(False)
        self._arguments.append(tree_flatten((args, kwargs)))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs, tree = self._arguments.pop()
        if self._depth.pop() or output is None:
            return
        self.num_calls += 1
        if isinstance(module, nn.Linear) and isinstance(output, Tensor) and output.requires_grad:
            self.rows[id(module.weight)] = self.rows.get(id(module.weight), 0) + output[..., 0].numel()
        key = (_kind(module), tuple(_shape(value) for value in inputs), str(tree))
        if (known := self._index.get(key)) is not None:
            self.calls[known].count += 1
            self.order.append(known)
            return
        weights: list[Tensor] = [p for p in module.parameters() if p.requires_grad and id(p) not in self.absorbed]
        detached = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in inputs]
        self._index[key] = len(self.calls)
        self.order.append(len(self.calls))
        self.calls.append(Call(module, detached, tree, weights, clones=bool(getattr(module, "inplace", False))))

    def time(self) -> list[float]:
        """One pass: seconds of each call, forward plus backward."""
        seconds = []
        for call in self.calls:
            try:
                seconds.append(self._time_call(call))
            except RuntimeError:
                call.clones = True
                seconds.append(self._time_call(call))
        return seconds

    def total_s(self, passes: Sequence[Sequence[float]]) -> float:
        """The sum over calls of the lower quartile of the passes, times the call's count."""
        columns = zip(*passes, strict=True)
        return sum(call.count * lower_quartile(column) for call, column in zip(self.calls, columns, strict=True))

    def largest(self, passes: Sequence[Sequence[float]], stages: int) -> float:
        """The longest one's part of the time, if the model is cut into ``stages`` between layers. Of a model that calls
        no module they are taken as even."""
        each_s = [lower_quartile(column) for column in zip(*passes, strict=True)]
        ends = list(itertools.accumulate(each_s[i] for i in self.order))
        if not ends:
            return 1 / stages
        cuts = [min(ends, key=lambda end: abs(end - ends[-1] * stage / stages)) for stage in range(1, stages)]
        return max(after - before for before, after in itertools.pairwise([0.0, *cuts, ends[-1]])) / ends[-1]

    def _time_call(self, call: Call) -> float:
        values = [v.clone() if call.clones and isinstance(v, Tensor) else v for v in call.inputs]
        args, kwargs = tree_unflatten(values, call.tree)
        sources = [v for v in values if isinstance(v, Tensor) and v.requires_grad] + call.weights
        with self._without(call.module):
            start = synced_time(values)
            with autocast(self.words, values):
                output = call.module(*args, **kwargs)
            forward_s = synced_time(values) - start
            outputs = [v for v in tree_flatten(output)[0] if isinstance(v, Tensor) and v.requires_grad]
            if not outputs or not sources:
                return forward_s
            slopes = [torch.ones_like(v) for v in outputs]
            start = synced_time(values)
            torch.autograd.grad(outputs, sources, slopes, allow_unused=True)
            return forward_s + synced_time(values) - start

    @contextlib.contextmanager
    def _without(self, module: nn.Module) -> Iterator[None]:
        """Within the context, absorbed weights need no gradient, as in a step."""
        absorbed = [p for p in module.parameters() if id(p) in self.absorbed]
        for weight in absorbed:
            weight.requires_grad_(False)
        try:
            yield
        finally:
            for weight in absorbed:
                weight.requires_grad_(True)


def lower_quartile(seconds: Sequence[float]) -> float:
    """A robust estimate, since other load on the machine only ever adds time."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def autocast(words: Sequence[str], values: Sequence[Any]) -> Any:
    half = next((HALVES[word] for word in words if word in HALVES), None)
    return torch.autocast(_device(values), half) if half else contextlib.nullcontext()


def synced_time(values: Sequence[Any]) -> float:
    """The clock in seconds, after synchronising the GPU."""
    if _device(values) == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def first_samples(batch: Any, rows: int, words: Sequence[str] = ()) -> Any:
    """The first ``rows`` of every tensor and list as long as the first tensor; ``words`` may ask for channels_last."""
    whole = next((len(leaf) for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim()), 0)
    leaves, tree = tree_flatten(batch, is_leaf=lambda each: _is_list(each, whole))
    return tree_unflatten([_first_samples(leaf, rows, whole, words) for leaf in leaves], tree)


def _first_samples(leaf: Any, rows: int, whole: int, words: Sequence[str]) -> Any:
    if _is_list(leaf, whole):
        return leaf[:rows]
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    taken = leaf[:rows] if len(leaf) == whole else leaf
    images = "channels_last" in words and taken.dim() == 4
    return taken.to(memory_format=torch.channels_last) if images else taken


def _is_list(value: Any, length: int) -> bool:
    """Whether a value is a list with one non-tensor per sample, such as strings; a collate_fn may make it a tuple."""
    some = isinstance(value, list) or (isinstance(value, tuple) and all(isinstance(v, str | bytes) for v in value))
    return some and len(value) == length and not any(isinstance(leaf, Tensor) for leaf in tree_flatten(value)[0])


def shapes(batch: Any, rows: int) -> list[tuple[str, tuple[int, ...]]]:
    """(type, shape) of each tensor: the shape of one sample, or of the tensor if it has no sample dimension."""
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    return [(str(t.dtype), tuple(t.shape[1:] if t.dim() and len(t) == rows else t.shape)) for t in tensors]


def _device(values: Sequence[Any]) -> str:
    return next((v.device.type for v in values if isinstance(v, Tensor)), "cpu")


def _kind(module: nn.Module) -> Any:
    """Key by which modules are equal: torch's own by type, repr and weight shapes, others by identity."""
    own = type(module).__module__.startswith("torch.nn")
    return (type(module), repr(module), tuple(_shape(p) for p in module.parameters())) if own else id(module)


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return repr(value)
