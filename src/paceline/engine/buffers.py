"""A model's buffers, as those know them who must copy, restore and share them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def solidify(model: nn.Module) -> None:
    """Gives each buffer that repeats one value (expanded) memory of its own, so that it can be written to."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if (
                buffer is not None
                and buffer.layout == torch.strided
                and any(stride == 0 and n > 1 for stride, n in zip(buffer.stride(), buffer.shape, strict=True))
            ):
                module._buffers[name] = buffer.contiguous()


def dense(model: nn.Module) -> list[Tensor]:
    return [each for each in model.buffers() if each.layout == torch.strided]


def sparse(model: nn.Module) -> dict[str, Tensor]:
    """In the COO layout; another is refused by `join`."""
    return {name: each for name, each in model.named_buffers() if each.layout == torch.sparse_coo}
