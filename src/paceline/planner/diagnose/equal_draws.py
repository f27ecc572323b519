"""Forward passes in which random numbers are the same for every sample, and operations that narrow are noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

HALF = 0.5
ONES = "bernoulli"  # a mask that lets everything through


class Pinned(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered: a draw of torch's gives one number throughout, whatever its shape.

    ``draws``: how many there were. ``narrow``: where float64 went in and float32 came out; ``place`` says where one is.
    ``pins``: whether draws are pinned, or only counted.
    """

    def __init__(self, place: Callable[[], str] = lambda: "", pins: bool = True):
        super().__init__()  # type: ignore[no-untyped-call]
        self.place, self.pins = place, pins
        self.draws = 0
        self.narrow: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        out = func(*args, **kwargs)
        if drawn and _draws(func, args, kwargs):
            self.draws += 1
            if self.pins and isinstance(out, Tensor):
                _pin(func, out)
        if isinstance(out, Tensor) and out.dtype == torch.float32 and _has_float64((args, kwargs)):
            where = self.place()
            self.narrow[where] = self.narrow.get(where, 0) + 1
        return out


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Attention kernels carry the mark, and draw where they drop out alone."""
    name = func._schema.name
    if "attention" in name:
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        return bool(given.get("dropout_p", 0.0))
    return True


def _has_float64(tree: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in tree_iter(tree))


def _pin(func: Any, out: Tensor) -> None:
    name = func._schema.name
    with torch.no_grad():
        if "randperm" in name:
            out.copy_(torch.arange(len(out), dtype=out.dtype))
        elif ONES in name:
            out.fill_(1)
        elif "dropout" in name:
            return
        elif out.dtype == torch.bool:
            out.fill_(True)
        elif out.is_floating_point():
            out.fill_(HALF)
        else:
            out.fill_(int(out.min()) if out.numel() else 0)
