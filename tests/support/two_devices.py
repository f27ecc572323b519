"""Two devices for one model: GPUs, one of them twice where there is one; else memory of the CPU with another name.

As on GPUs, an operation on tensors of different devices is an error, unless one is a number; a tensor moves by ``to``.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from device import DEVICE

if DEVICE.type == "cpu":
    PLACES = [torch.device("cpu", 1), torch.device("cpu", 2)]
else:
    PLACES = [torch.device("cuda", 0), torch.device("cuda", min(1, torch.cuda.device_count() - 1))]
ASKED = ";".join(map(str, PLACES))
MOVES = "aten::_to_copy", "aten::copy_"


class Placed(Tensor):
    """``values`` on the CPU that are said to lie on ``place``."""

    values: Tensor
    place: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor, place: torch.device, requires_grad: bool = False) -> Placed:
        made: Placed = Tensor._make_subclass(cls, values, requires_grad, dispatch_device=True)
        made.values, made.place = values, place
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = Placed(self.values.clone(), self.place)
        memo[id(self)] = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values.__reduce_ex__(protocol)

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, new: Placed) -> None:
        Tensor.data.__set__(self, new)
        self.values, self.place = new.values, new.place

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.name()
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        own = {id(each.values): each for each in given if isinstance(each, Placed)}
        if name == "prim::device":
            return args[0].place
        places = {each.device for each in given if isinstance(each, Placed) or each.dim()}
        if len(places) > 1 and name not in MOVES and not name.startswith("c10d"):
            raise RuntimeError(f"Expected all tensors to be on the same device, {name} got {sorted(map(str, places))}")
        wanted = kwargs.get("device")
        place = torch.device(wanted) if wanted is not None else next(e.place for e in given if isinstance(e, Placed))
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        plain_args, plain_kwargs = tree_map(lambda e: e.values if isinstance(e, Placed) else e, (args, kwargs))
        found = func(*plain_args, **plain_kwargs)
        if place.index is None:
            return found
        if name == "aten::copy_":
            return args[0]

        def put(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            return own[id(each)] if id(each) in own else Placed(each, place)

        return tree_map(put, found)


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Torch knows one CPU, and would leave a tensor of its own where it is."""
    moved = plain_to(self, *args, **kwargs)
    given = [each.device if isinstance(each, Tensor) else each for each in (*args, kwargs.get("device"))]
    asked = [each for each in given if each in PLACES]
    return Placed(moved, asked[0]) if asked and not isinstance(moved, Placed) else moved


plain_to = Tensor.to
if DEVICE.type == "cpu":
    Tensor.to = _to  # type: ignore[method-assign,assignment]


def on(model: nn.Module, place: torch.device = PLACES[0]) -> nn.Module:
    """A copy of the model on this device."""
    made = copy.deepcopy(model)
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(place), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(place)
    return made
