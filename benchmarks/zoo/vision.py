"""Images: models of timm and torchvision, in their smallest sizes, with batch statistics over all processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
import torch
import torchvision
from timm.layers import GroupNormAct, StdConv2d
from timm.models.metaformer import MetaFormer
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnetv2 import ResNetV2
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, NAdam, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR

from zoo.case import Parts, family, images

of_timm, of_torchvision = family("vision (timm)"), family("vision (torchvision)")
SYNC = {"batch_norm": "sync"}


def named(name: str) -> Any:
    """An optimizer of timm's own."""

    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return create_optimizer_v2(parameters, opt=name, lr=lr, weight_decay=0.01)

    make.__name__ = f"timm's {name}"
    return make


def net(name: str, side: int = 32, **words: Any) -> Parts:
    return timm.create_model(name, num_classes=5, drop_rate=0.0, **words), images(side), F.cross_entropy


@of_timm(SGD, lr=0.05, momentum=0.9, nesterov=True, join=SYNC)
def resnet10t() -> Parts:
    return net("resnet10t")


@of_timm(RMSprop, lr=0.0005, momentum=0.9, join=SYNC)
def mobilenetv3_small_050() -> Parts:
    return net("mobilenetv3_small_050")


@of_timm(named("rmsproptf"), lr=0.0005, join=SYNC)
def efficientnet_b0() -> Parts:
    return net("efficientnet_b0")


@of_timm(SGD, lr=0.05, momentum=0.9, join=SYNC)
def regnetx_002() -> Parts:
    return net("regnetx_002")


@of_timm(Adam, lr=0.001, join=SYNC)
def ghostnet_050() -> Parts:
    return net("ghostnet_050")


@of_timm(SGD, lr=0.05, momentum=0.9, join=SYNC)
def lcnet_035() -> Parts:
    return net("lcnet_035")


@of_timm(AdamW, lr=0.001, weight_decay=0.05, schedule=partial(CosineAnnealingLR, T_max=6), join={"clip": 1.0})
def vit_tiny() -> Parts:
    return net("vit_tiny_patch16_224", img_size=32, depth=2)


@of_timm(AdamW, lr=0.001)
def convnext_atto() -> Parts:
    return net("convnext_atto", depths=(1, 1, 2, 1))


@of_timm(named("lamb"), lr=0.01)
def mlp_mixer() -> Parts:
    model = MlpMixer(num_classes=5, img_size=32, patch_size=8, num_blocks=2, embed_dim=64)
    return model, images(), F.cross_entropy


@of_timm(named("adafactor"), lr=0.001)
def swin_tiny() -> Parts:
    return net(
        "swin_tiny_patch4_window7_224",
        drop_path_rate=0.0,
        img_size=32,
        window_size=4,
        depths=(1, 1),
        num_heads=(2, 4),
        embed_dim=24,
    )


@of_timm(named("lion"), lr=0.0005)
def poolformer() -> Parts:
    model = MetaFormer(num_classes=5, depths=(1, 1, 1, 1), dims=(16, 24, 32, 40))
    return model, images(), F.cross_entropy


@of_timm(NAdam, lr=0.001, join=SYNC)
def mobilevit_xxs() -> Parts:
    return net("mobilevit_xxs", 64)


@of_timm(AdamW, lr=0.001, join=SYNC)
def xcit_nano() -> Parts:
    """Its patches and local part have batch norm."""
    return net("xcit_nano_12_p16_224", img_size=32, depth=2)


@of_timm(SGD, lr=0.02, momentum=0.9)
def resnetv2_groups() -> Parts:
    """Group norm, and standardized weights."""
    model = ResNetV2((1, 1), (128, 128), num_classes=5, stem_chs=32, conv_layer=StdConv2d, norm_layer=GroupNormAct)
    return model, images(), F.cross_entropy


@of_torchvision(SGD, lr=0.05, momentum=0.9, join=SYNC)
def shufflenet_v2() -> Parts:
    return torchvision.models.shufflenet_v2_x0_5(num_classes=5), images(), F.cross_entropy


@of_torchvision(Adam, lr=0.0005)
def squeezenet() -> Parts:
    return torchvision.models.squeezenet1_1(num_classes=5, dropout=0.0), images(), F.cross_entropy


class Segment(nn.Module):
    """A dict of outputs, of which one helps in training alone."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.segmentation import lraspp_mobilenet_v3_large

        self.net = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)["out"]


@of_torchvision(SGD, lr=0.02, momentum=0.9, join=SYNC)
def segmentation() -> Parts:
    """A class for each pixel, some of which count for nothing."""
    from torch.utils.data import TensorDataset

    from zoo.case import labels

    pixels = labels(5, 32, 32)
    return (
        Segment(),
        TensorDataset(images().tensors[0], torch.where(pixels == 4, 255, pixels)),
        nn.CrossEntropyLoss(ignore_index=255),
    )
