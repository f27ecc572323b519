"""Common parts of the residual networks: pre-activation blocks (version 2), in four stages.

As in Keras, the 3x3 convolution of a stage's *last* block has the stride, its shortcut is subsampled, and the first
pooling layer is padded with zeros; He et al. have the stride in the first block of the next stage.

*Source*: He, Zhang, Ren and Sun, "Identity Mappings in Deep Residual Networks", arXiv 1603.05027 (2016);
initial weights: the same authors, arXiv 1502.01852 (2015), equation 10. The last layer has small initial weights
(Goyal et al., arXiv 1706.02677 (2017), section 5.1), so the first loss is near log(num_classes).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

WIDTHS = (64, 128, 256, 512)


def _norm(num_channels: int) -> nn.BatchNorm2d:
    # torch's momentum is the weight of the new batch, Keras's 0.99 that of the old mean
    return nn.BatchNorm2d(num_channels, eps=1.001e-5, momentum=0.01)


class _Block(nn.Module):
    """*Shapes*: (n, num_in, h, w) to (n, 4 width, h / stride, w / stride). ``widens``: the first of its stage."""

    def __init__(self, num_in: int, width: int, stride: int, widens: bool):
        super().__init__()
        self.widens = widens
        self.preactivation = nn.Sequential(_norm(num_in), nn.ReLU(inplace=True))
        self.shortcut: nn.Module = nn.Identity()
        if widens:
            self.shortcut = nn.Conv2d(num_in, 4 * width, 1, stride)
        elif stride > 1:
            self.shortcut = nn.MaxPool2d(1, stride)
        self.residual = nn.Sequential(
            nn.Conv2d(num_in, width, 1, bias=False),
            _norm(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            _norm(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        active = self.preactivation(x)
        output: torch.Tensor = self.shortcut(active if self.widens else x) + self.residual(active)
        return output


def _stage(num_in: int, width: int, depth: int, stride: int) -> nn.Sequential:
    blocks = []
    for index in range(depth):
        last = index == depth - 1
        blocks.append(_Block(4 * width if index else num_in, width, stride if last else 1, widens=not index))
    return nn.Sequential(*blocks)


def network(depths: Sequence[int], num_classes: int) -> nn.Sequential:
    """``depths``: blocks in each of the four stages. (n, 3, h, w) images to (n, num_classes) logits."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(3, WIDTHS[0], 7, stride=2, padding=3)
    layers["pool1"] = nn.Sequential(nn.ZeroPad2d(1), nn.MaxPool2d(3, stride=2))
    num_in = WIDTHS[0]
    for index, (width, depth) in enumerate(zip(WIDTHS, depths, strict=True)):
        stride = 1 if index == len(WIDTHS) - 1 else 2
        layers[f"conv{index + 2}"] = _stage(num_in, width, depth, stride)
        num_in = 4 * width
    layers["norm"] = _norm(num_in)
    layers["relu"] = nn.ReLU(inplace=True)
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["linear"] = nn.Linear(num_in, num_classes)
    result = nn.Sequential(layers)
    for module in result.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
    return result
