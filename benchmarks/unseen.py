"""Models of transformers with random weights, by which nothing in a plan's predictions was ever tuned.

PYTHONPATH=benchmarks python -c "
from paceline_bench.single.plan_search import searched
one = searched('unseen:convnext@128', 8, 3, print)
print(one.chosen, one.behind, one.table())"
"""

from __future__ import annotations

import transformers
from torch import Tensor, nn


class Logits(nn.Module):
    """Of an image classifier: the tensor alone."""

    def __init__(self, classifier: nn.Module):
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(images).logits
        return logits


def convnext(num_classes: int) -> nn.Module:
    """ConvNeXt tiny, 28 million parameters: depthwise convolutions of 7x7 and wide fully-connected layers."""
    config = transformers.ConvNextConfig(num_labels=num_classes)
    return Logits(transformers.ConvNextForImageClassification(config))


def mobilenet(num_classes: int) -> nn.Module:
    """MobileNetV2, 2.2 million parameters in some fifty thin convolutions with batch norm."""
    config = transformers.MobileNetV2Config(num_labels=num_classes)
    return Logits(transformers.MobileNetV2ForImageClassification(config))
