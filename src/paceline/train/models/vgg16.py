"""VGG16 for 224x224 colour images: 13 convolutions and 3 fully-connected layers, 138 million parameters.

Layers: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", arXiv 1409.1556
(2014), column D. Initial weights: He et al., arXiv 1502.01852 (2015), equation 14 for convolutions and 10 for
fully-connected layers. Learning rate and momentum: Lerat, Mahmoudi and Mahmoudi, "Distributed Deep Learning: From
Single-Node to Multi-Node Architecture", Electronics 11(10):1525 (2022); batch size and epochs are our own choice.
"""

from typing import ClassVar

import torch
from torch import nn

INPUT = (3, 224, 224)
LEARNING_RATE = 0.001
MOMENTUM = 0.9
BATCH_SIZE = 8
EPOCHS = 10

WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def _features() -> nn.Sequential:
    layers: list[nn.Module] = []
    num_in = INPUT[0]
    for stage in WIDTHS:
        for width in stage:
            layers += [nn.Conv2d(num_in, width, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
            num_in = width
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return nn.Sequential(*layers)


class _VGG16(nn.Module):
    """Attribute names and layer positions are torchvision's, so that its weights load unchanged."""

    pipeline_cuts: ClassVar = {2: ["features.18"]}  # after the eighth convolution: Lerat et al. 2022

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = _features()
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                backward = isinstance(module, nn.Conv2d)
                nn.init.kaiming_normal_(module.weight, mode="fan_out" if backward else "fan_in", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        # small initial weights, so that the first loss is near log(num_classes)
        nn.init.normal_(self.classifier[-1].weight, std=0.01)  # type: ignore[arg-type]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits


def build(num_classes: int) -> nn.Module:
    """Make the network: (n, 3, 224, 224) images to (n, num_classes) logits."""
    return _VGG16(num_classes)
