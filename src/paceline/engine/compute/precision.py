"""Numerics: memory layout, precision, fused updates, compilation; options of a configuration beside its engine.

A configuration is an engine and such options: "processes:2+channels_last+bf16".

Loss scaling for fp16: the loss is multiplied by a power of two, so that small gradients do not underflow. A step whose
gradient overflows is skipped and the scale halved; after many good steps the scale doubles.
*Source*: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.engine.node.several_optimizers import members

PRECISION = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS = ("channels_last", "bf16", "fp16", "fused", "compile")
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


@dataclass(frozen=True)
class Numerics:
    """``channels_last`` and ``fused`` are exact; bf16 and fp16 compute forward and backward in 16 bits (autocast)."""

    channels_last: bool = False
    precision: str = "fp32"
    fused: bool = False
    compile: bool = False

    @classmethod
    def parse(cls, options: Sequence[str]) -> Numerics:
        """Raises ValueError for an unknown option, or two that exclude each other."""
        if unknown := [option for option in options if option not in OPTIONS]:
            raise ValueError(f"no numerics named {', '.join(map(repr, unknown))}; known: {', '.join(OPTIONS)}")
        if "bf16" in options and "fp16" in options:
            raise ValueError("bf16 and fp16 exclude each other; choose one")
        precision = next((option for option in options if option in PRECISION), "fp32")
        return cls("channels_last" in options, precision, "fused" in options, "compile" in options)

    @property
    def fidelity(self) -> str:
        return "exact" if self.precision == "fp32" else "rounded"

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.compile:
            model.compile()
        for each in members(optimizer) if self.fused else ():
            for group in each.param_groups if type(each) in FUSED else ():
                group["fused"], group["foreach"] = True, False

    def forward(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        dtype = PRECISION[self.precision]
        return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()

    def moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        """An input on the model's device, in the requested layout, which each layer passes on to the next."""
        early = device.type == "cuda"  # whose stream waits for the copy; the CPU would read what has not arrived
        if self.channels_last and tensor.dim() == 4:
            return tensor.to(device, memory_format=torch.channels_last, non_blocking=early)
        return tensor.to(device, non_blocking=early)


def parse_row(row: str) -> tuple[str, Numerics]:
    """ "processes:2+channels_last" is ("processes:2", its numerics)."""
    engine, *options = (part.strip() for part in row.split("+"))
    return engine, Numerics.parse(options)


START, GROWTH_STEPS = 65536.0, 2000


@dataclass
class Scaler:
    """``scale`` 1 and ``moves`` False: no scaling."""

    scale: float = START
    moves: bool = False
    good_steps: int = 0

    @property
    def can_shrink(self) -> bool:
        """Whether a too large scale may be the cause of a step that is not finite."""
        return self.moves and self.scale > 1.0

    def move(self, applied: bool) -> None:
        if not self.moves:
            return
        self.good_steps = self.good_steps + 1 if applied else 0
        if not applied:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps % GROWTH_STEPS == 0:
            self.scale *= 2
