"""Values that weights take, whole or in part, beside their gradients: averages, and what another node has.

*Laws*: a target and the reading of it are inverse, whatever the memory's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.messages import Target


def read(tensor: Tensor, first: int, last: int) -> Tensor:
    """From ``first`` to ``last`` in the order of a contiguous tensor; a view of the tensor where it is contiguous."""
    return tensor.detach().reshape(-1)[first:last]


@torch.no_grad()
def write(targets: Sequence[Target], weights: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
    kept = states(weights, optimizer) if any(each.key for each in targets) else {}
    for each in targets:
        tensor = kept[each.weight][each.key] if each.key else weights[each.weight]
        flat = tensor.reshape(-1)
        flat[each.first : each.first + each.values.numel()] = each.values
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


def states(weights: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> dict[int, Mapping[str, Tensor]]:
    """What the optimizer keeps of each weight, which it holds as the same memory: tensors, by their names."""
    places = {weight.data_ptr(): index for index, weight in enumerate(weights) if weight.numel()}
    owned = [p for group in optimizer.param_groups for p in group["params"] if p.data_ptr() in places]
    return {
        places[p.data_ptr()]: {k: v for k, v in sorted(optimizer.state.get(p, {}).items()) if isinstance(v, Tensor)}
        for p in owned
    }
