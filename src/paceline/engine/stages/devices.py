"""Stages on devices of their own: which device each has, and which layers lie there.

    a stage's layers      those from its cut on, in the order in which the model registers its modules
    what reaches a layer  moves to the layer's device, and its gradient back

*Invariants*: a device has the weights, buffers, gradients and optimizer state of its stages only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.engine.compute.batch import mapped
from paceline.engine.node.several_optimizers import members
from paceline.report.log import log

LISTS = nn.Sequential, nn.ModuleList


def chosen(asked: Sequence[str], own: torch.device, num_stages: int, num_gpus: int) -> list[torch.device]:
    """The device of each stage; none where the stages divide the cores of a processor. ``own``: the model's, of
    ``num_gpus`` that this process sees."""
    if not asked and own.type == "cpu":
        return []
    if asked:
        try:
            found = [torch.device(name) for name in asked]
        except RuntimeError as error:
            raise ValueError(f"a pipeline's devices={';'.join(asked)!r}: {str(error).splitlines()[0]}") from None
        if any(each.type == "cuda" and (each.index or 0) >= num_gpus for each in found):
            raise ValueError(f"a pipeline's devices={';'.join(asked)!r}, and this process sees {num_gpus} GPUs")
        if len(found) != num_stages:
            raise ValueError(f"a pipeline of {num_stages} stages needs a device each, got devices={';'.join(asked)!r}")
        return found
    first = own.index or 0
    if own.type != "cuda" or first + num_stages > num_gpus:
        raise ValueError(
            f"a pipeline of {num_stages} stages puts each on a GPU of its own, from that of the model on, and the "
            f"model lies on {own}, of {num_gpus} GPUs that this process sees; use fewer stages, name the device of "
            f"each by devices=, or put the model on the CPU, whose cores the stages divide"
        )
    return [torch.device("cuda", first + stage) for stage in range(num_stages)]


def even_cuts(model: nn.Module, num_stages: int) -> list[str]:
    """Where stages have about as many bytes of weights: before elements of lists and sequences, or before children of
    the model itself, since what a block of layers does inside is its own."""
    places = list(_places(model))
    ends = list(accumulate(sum(p.nbytes for p in module.parameters()) for _, module in places))
    begins = dict(zip([name for name, _ in places][1:], ends, strict=False))
    cuts: list[str] = []
    for stage in range(1, num_stages):
        free = list(begins)[list(begins).index(cuts[-1]) + 1 :] if cuts else list(begins)
        if not free:
            raise ValueError(
                f"a pipeline of {num_stages} stages finds {len(places)} places at which {type(model).__name__} can be "
                f"cut; use fewer stages, or name the modules by cut="
            )
        cuts.append(min(free, key=lambda name: abs(begins[name] - ends[-1] * stage / num_stages)))
    return cuts


def _places(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    inside = isinstance(module, LISTS)
    for name, child in module.named_children():
        lists = any(isinstance(each, nn.ModuleList) for each in child.modules())
        if isinstance(child, LISTS) or (lists and not inside):
            yield from _places(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def units(model: nn.Module, cuts: Sequence[str]) -> Iterator[tuple[int, nn.Module, bool]]:
    """(stage, module, whole) of the largest modules that lie in one stage; and of those with a cut inside, of which
    only the tensors of their own lie there."""
    stage, done = 0, ""
    for name, module in model.named_modules():
        if done and name.startswith(done):
            continue
        stage += name in cuts
        whole = bool(name) and not any(cut.startswith(f"{name}.") for cut in cuts)
        done = f"{name}." if whole else ""
        yield stage, module, whole


def place(model: nn.Module, optimizer: Optimizer, cuts: Sequence[str], devices: Sequence[torch.device]) -> str:
    """Moves each stage's layers, and what the optimizer holds of them, to its device; says so. Raises ValueError for a
    parameter of two stages."""
    stages, nbytes = dict[int, int](), [0] * len(devices)
    layers = [
        (stage, each)
        for stage, module, whole in units(model, cuts)
        for each in (module.modules() if whole else (module,))
    ]
    for stage, layer in layers:
        for name, parameter in layer.named_parameters(recurse=False):
            if stages.setdefault(id(parameter), stage) != stage:
                raise ValueError(
                    f"parameter {name!r} of a {type(layer).__name__} is used by stages {stages[id(parameter)]} and "
                    f"{stage} of the pipeline, which have a device each; cut the model elsewhere (at "
                    f"{', '.join(cuts)} now), or use another engine"
                )
    for stage, layer in layers:
        for parameter in layer.parameters(recurse=False):
            _move(parameter, devices[stage], optimizer)
            nbytes[stage] += parameter.nbytes
        for name, buffer in layer.named_buffers(recurse=False):
            layer._buffers[name] = buffer.to(devices[stage])
    percents = [f"{100 * part / sum(nbytes):.0f} %" for part in nbytes]
    lies = ", ".join(f"{percent} on {device}" for percent, device in zip(percents, devices, strict=True))
    return (
        f"the model is cut before {', '.join(map(repr, cuts))}, and its weights lie {lies}; name other modules by cut="
    )


def bring(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """The reverse of `place`, onto one device, where it is large enough."""
    try:
        for parameter in model.parameters():
            _move(parameter, device, optimizer)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
    except torch.OutOfMemoryError:
        log.warning(f"{device} has not enough memory for the whole model, which stays on several devices")


def _move(parameter: nn.Parameter, device: torch.device, optimizer: Optimizer) -> None:
    if (before := parameter.device) == device:
        return
    parameter.data = parameter.data.to(device)
    parameter.grad = None
    for one in members(optimizer):
        state: dict[str, Any] = one.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device == before and (value.dim() or _counts_there(one, parameter)):
                state[key] = value.to(device)


def _counts_there(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    """Whether the optimizer counts the steps of this parameter on the parameter's device."""
    groups = [group for group in optimizer.param_groups if any(each is parameter for each in group["params"])]
    return any(group.get("fused") or group.get("capturable") for group in groups)


def follow(model: nn.Module, cuts: Sequence[str], devices: Sequence[torch.device]) -> Iterator[Any]:
    """Hooks by which what is passed to a layer of a stage after the first moves to the stage's device."""

    def moved(device: torch.device, _: nn.Module, *passed: Any) -> Any:
        there: dict[int, Tensor] = {}  # a tensor that is passed twice is one there too: attention looks whether it is

        def move(tensor: Tensor) -> Tensor:
            return there.setdefault(id(tensor), tensor.to(device))

        return mapped(passed, move)

    for stage, module, whole in units(model, cuts):
        if stage and whole:
            yield module.register_forward_pre_hook(partial(moved, devices[stage]), with_kwargs=True)


def enter(device: torch.device) -> None:
    """The current device of this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
