"""A model's buffers, as those know them who must copy, restore and share them."""

from __future__ import annotations

from torch import nn


def solidify(model: nn.Module) -> None:
    """Gives each buffer that repeats one value (expanded) memory of its own, so that it can be written to."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and any(
                stride == 0 and n > 1 for stride, n in zip(buffer.stride(), buffer.shape, strict=True)
            ):
                module._buffers[name] = buffer.contiguous()
