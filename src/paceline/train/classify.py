"""Inference: classifies images with the weights of a checkpoint; gives the most likely classes and probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from paceline.checkpoint.checkpoint import TREE, read, read_newest
from paceline.checkpoint.export import load
from paceline.data import images as folders
from paceline.data import sample
from paceline.train.network import network

ROWS = 32  # images at a time
COLOUR, GREY = (3, 224, 224), (1, 28, 28)
REQUIRED = {"model": "its name", "classes": "their names", "input": "the shape of an image"}


class Prediction(NamedTuple):
    """``top``: classes and probabilities, the most likely first."""

    image: Path
    top: list[tuple[str, float]]


@torch.no_grad()
def predict(checkpoint: Path, images: Sequence[Path], top: int = 3) -> list[Prediction]:
    """The ``top`` most likely classes of each image, in the order given; preprocessing is that of a test.

    ``checkpoint`` is a run's folder (its newest complete checkpoint), a checkpoint's folder or an exported file. If its
    model is a ``package.module:function``, that function is imported and called: use only checkpoints that you trust.
    Raises ValueError for a missing file, no image or weights that do not fit, CheckpointError for a damaged checkpoint.
    """
    if top < 1 or not images:
        raise ValueError(f"predict needs one image or more and top >= 1, got {len(images)} images and top={top}")
    errors = [f"- {path}: {'a folder' if path.is_dir() else 'no such file'}" for path in images if not path.is_file()]
    if errors:
        raise ValueError("these are no images:\n" + "\n".join(errors) + "\nAccepted: image files; check the paths.")
    weights, facts = _open(checkpoint)
    classes, prepare = facts["classes"], _preparation(facts["input"])
    model = _load_model(facts["model"], len(classes), weights, checkpoint).eval()
    predictions, paths = [], iter(images)
    while batch := list(islice(paths, ROWS)):
        output = model(prepare(batch))
        if not isinstance(output, Tensor) or output.shape != (len(batch), len(classes)):
            what = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"model {facts['model']!r} returns {what} for {len(batch)} images; "
                f"predict needs logits of shape {(len(batch), len(classes))}, for {len(classes)} classes"
            )
        if not output.isfinite().all():
            raise ValueError(f"the model of {checkpoint} returns values that are not finite: its training had diverged")
        for path, row in zip(batch, output.double().softmax(1), strict=True):
            best = row.topk(min(top, len(classes)))
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            predictions.append(Prediction(path, [(classes[index], probability) for probability, index in pairs]))
    return predictions


def _open(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and metadata, with all that is REQUIRED."""
    if path.is_file():
        weights, facts = load(path)
    else:
        checkpoint = read(path) if (path / TREE).exists() else read_newest(path)
        if checkpoint is None:
            raise ValueError(
                f"there is no checkpoint in {path}{'' if path.exists() else ', which does not exist'}; accepted: "
                "the folder of a run, one of its folders checkpoint-NNNNNNNN, or exported weights (.safetensors)"
            )
        weights, facts = checkpoint.weights, checkpoint.facts
    if missing := [f"{name} ({what})" for name, what in REQUIRED.items() if not facts.get(name)]:
        raise ValueError(
            f"{path} does not contain {', '.join(missing)}, so its network cannot be built; accepted: what "
            "`paceline train` writes, or weights exported with these facts"
        )
    return weights, facts


def _load_model(name: str, num_classes: int, weights: Mapping[str, Tensor], checkpoint: Path) -> nn.Module:
    model = network(name).build(num_classes)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"the weights in {checkpoint} do not fit model {name!r} with {num_classes} classes: {error}; "
            "use the code that trained them"
        ) from error
    return model


def _preparation(shape: Sequence[int]) -> Callable[[Sequence[Path]], Tensor]:
    if tuple(shape) == COLOUR:
        return _colour
    if tuple(shape) == GREY:
        return _grey
    raise ValueError(f"the network takes images of shape {tuple(shape)}; predict prepares {COLOUR} and {GREY}")


def _colour(paths: Sequence[Path]) -> Tensor:
    """*Shapes*: (n, 3, 224, 224)."""
    source = folders.ImageFolder(paths, [0] * len(paths), ("unknown",), train=False, seed=0)
    return source.fetch(range(len(paths)), 0)[0]


def _grey(paths: Sequence[Path]) -> Tensor:
    """*Shapes*: (n, 1, 28, 28). The images should show light objects on black, as the embedded sample does."""
    pixels, errors = np.empty((len(paths), *GREY), np.float32), []
    for slot, path in enumerate(paths):
        try:
            with Image.open(path) as file:
                grey = ImageOps.exif_transpose(file).convert("L")
                pixels[slot, 0] = np.asarray(grey.resize(GREY[1:], Image.Resampling.BILINEAR))
        except Exception as error:  # decoders of damaged files raise almost anything
            errors.append(f"- {path}: {error}")
    if errors:
        raise ValueError(f"cannot read {len(errors)} images:\n" + "\n".join(errors) + "\nAccepted: complete images.")
    return torch.from_numpy(pixels).div_(255).sub_(sample.MEAN).div_(sample.STD)
