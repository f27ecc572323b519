"""AlexNet for 224x224 colour images: the one-tower variant, 57 million parameters with three classes.

Layers: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv 1404.5997 (2014).
Training defaults: Lerat, Mahmoudi and Mahmoudi, "Distributed Deep Learning: From Single-Node to Multi-Node
Architecture", Electronics 11(10):1525 (2022); the number of epochs is our own choice.
"""

from typing import ClassVar

import torch
from torch import nn

INPUT = (3, 224, 224)
LEARNING_RATE = 0.001
MOMENTUM = 0.9
BATCH_SIZE = 32
EPOCHS = 10


class _AlexNet(nn.Module):
    """Attribute names and layer positions are torchvision's, so that its weights load unchanged."""

    pipeline_cuts: ClassVar = {2: ["features.9"]}  # after the fourth convolution: Lerat et al. 2022

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits


def build(num_classes: int) -> nn.Module:
    """Make the network: (n, 3, 224, 224) images to (n, num_classes) logits."""
    return _AlexNet(num_classes)
