"""Beside CPU torch, torchvision's compiled operators are not there, and it asks for two of them when it is imported.

Import this before torchvision, timm and transformers. No model here calls them.
"""

from __future__ import annotations

import importlib.util

import torch

if importlib.util.find_spec("torchvision"):
    try:
        import torchvision  # noqa: F401 - its own operators fit this torch
    except RuntimeError:
        _operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
