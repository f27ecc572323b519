"""Some rows of a weight, and of what the optimizer keeps of it.

What has the weight's shape is cut as the weight is; all else belongs to every row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.messages import RowRange


def numbered(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Each parameter's number in the optimizer's ``state_dict``, by each of its names.

    None where that ``state_dict`` holds more than the state of this model's parameters.
    """
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


def put(mine: Any, its: Any, shape: torch.Size, window: RowRange) -> Any:
    """``mine`` with the rows that have come, or a copy of what has come instead of it."""
    if not isinstance(its, Tensor):
        return its
    if not is_cut(its, shape, window):
        return its.clone()
    if mine is None or mine.shape != shape:
        mine = torch.zeros(shape, dtype=its.dtype, device=its.device)
    mine[slice(*window)].copy_(its)
    return mine
