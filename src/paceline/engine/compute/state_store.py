"""Parts of a weight and of its optimizer state, which processes send to each other.

By rows: state of the weight's shape is cut as the weight is; other state belongs to every row. By values: in the order
of a contiguous tensor, whatever the memory layout; `write` is the inverse of `read`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import contract
from paceline.messages import RowRange, Target

Part = list[tuple[int, int, int]]  # index of the tensor, its first value, its last value + 1


def numbered(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Each parameter's number in the optimizer's ``state_dict``, by each of its names. Empty where that ``state_dict``
    holds more than the state of this model's parameters."""
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(given)}
    named = model.named_parameters(remove_duplicate=False)
    found = {name: numbers[id(parameter)] for name, parameter in named if id(parameter) in numbers}
    plain = optimizer.state_dict().keys() <= {"state", "param_groups"}
    return found if plain and len(set(found.values())) == len(given) else {}


def cut(value: Any, shape: torch.Size, window: RowRange) -> Any:
    start, stop = window
    return value[start:stop] if stop and isinstance(value, Tensor) and value.shape == shape else value


def is_cut(value: Any, shape: torch.Size, window: RowRange) -> bool:
    """Whether ``value`` is these rows of something that has the weight's shape."""
    start, stop = window
    return stop > 0 and isinstance(value, Tensor) and value.shape == (stop - start, *shape[1:])


def put(own: Any, its: Any, shape: torch.Size, window: RowRange) -> Any:
    """``own`` with the received rows ``its`` written into it, or a copy of ``its`` where these are not rows."""
    if not isinstance(its, Tensor):
        return its
    if not is_cut(its, shape, window):
        return its.clone()
    if own is None or own.shape != shape:
        own = torch.zeros(shape, dtype=its.dtype, device=its.device)
    own[slice(*window)].copy_(its)
    return own


def rows(
    optimizer: Optimizer, numbers: Mapping[str, int], weights: Mapping[str, Tensor], windows: Mapping[str, RowRange]
) -> dict[str, dict[str, Any]]:
    """The optimizer state of these rows, by the weights' names. ``numbers``: the result of `numbered`."""
    states = optimizer.state_dict()["state"]
    return {
        name: {key: cut(value, weights[name].shape, window) for key, value in states[number].items()}
        for name, window in windows.items()
        if (number := numbers[name]) in states
    }


def take_rows(
    optimizer: Optimizer,
    numbers: Mapping[str, int],
    weights: Mapping[str, Tensor],
    states: Mapping[str, Mapping[str, Any]],
    windows: Mapping[str, RowRange],
) -> None:
    """The reverse of `rows`."""
    whole = optimizer.state_dict()
    for name, window in windows.items():
        own, shape = whole["state"].pop(numbers[name], {}), weights[name].shape
        if name in states:
            its = {key: put(own.get(key), value, shape, window) for key, value in states[name].items()}
            whole["state"][numbers[name]] = its
    optimizer.load_state_dict(whole)


def bucket_devices(engine: contract.Engine) -> dict[int, torch.device]:
    """That of each bucket, by its index: where its gradients are added up."""
    weights = dict(zip(engine.names, engine.weights, strict=True))
    return {bucket.index: weights[bucket.names[0]].device for bucket in engine.buckets}


def read(tensor: Tensor, first: int, last: int) -> Tensor:
    """Values ``first`` to ``last`` in the order of a contiguous tensor; a view where the tensor is contiguous."""
    return tensor.detach().reshape(-1)[first:last]


def crc(tensors: Sequence[Tensor], part: Part) -> int:
    check = 0
    for index, start, stop in part:
        values = tensors[index].reshape(-1)[start:stop]
        check = zlib.crc32(values.view(torch.uint8).cpu().numpy().data, check)
    return check


@torch.no_grad()
def write(targets: Sequence[Target], weights: Sequence[Tensor], optimizer: Optimizer) -> None:
    stored = states(weights, optimizer) if any(each.key for each in targets) else {}
    for each in targets:
        tensor = stored[each.weight][each.key] if each.key else weights[each.weight]
        flat = tensor.reshape(-1)
        flat[each.first : each.first + each.values.numel()] = each.values
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


def states(weights: Sequence[Tensor], optimizer: Optimizer) -> dict[int, Mapping[str, Tensor]]:
    """The optimizer's state tensors of each weight, by name. The optimizer must hold the weight as the same memory."""
    places = {weight.data_ptr(): index for index, weight in enumerate(weights) if weight.numel()}
    owned = [p for group in optimizer.param_groups for p in group["params"] if p.data_ptr() in places]
    return {
        places[p.data_ptr()]: {k: v for k, v in sorted(optimizer.state.get(p, {}).items()) if isinstance(v, Tensor)}
        for p in owned
    }


def in_parts(numels: Sequence[int], each: int, whole: bool = False) -> list[Part]:
    """Parts of ``each`` values, the last may be smaller. ``whole``: no tensor is cut, so parts may be larger.

    *Invariants*: every value is in one part; the order is that of the tensors.
    """
    parts: list[Part] = []
    part: Part = []
    room = each
    for index, numel in enumerate(numels):
        start = 0
        while start < numel:
            stop = numel if whole else min(numel, start + room)
            part.append((index, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                parts.append(part)
                part, room = [], each
    return [*parts, part] if part else parts
