"""Small runs of all kinds: whole, saved at every step, and gone on with from each of those checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

import paceline
from paceline.step.average import average

ROWS, COUNT, EPOCHS = 16, 44, 2  # three steps an epoch, the last one short
STEPS = EPOCHS * -(-COUNT // ROWS)
Run = tuple[list[float], list[Tensor]]


class Noisy:
    """Draws from Python's, NumPy's and PyTorch's random numbers with every sample."""

    def __init__(self, noise: float):
        dice = torch.Generator().manual_seed(5)
        self.x = torch.randn(COUNT, 12, generator=dice)
        self.noise = noise

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.rand(12) + random.random() + np.random.rand() if self.noise else 0.0
        return self.x[i] + self.noise * noise, i % 3


def net(drop: float = 0.0) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(drop)),
        *(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 200), nn.Tanh(), nn.Linear(200, 3)),
    )


@dataclass
class Kind:
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1)
    scheduler: Callable[[Any], Any] | None = None
    drop: float = 0.0
    noise: float = 0.0
    scale: float | None = None
    averages: bool = False  # between steps, and before a checkpoint
    options: dict[str, Any] = field(default_factory=dict)

    def run(
        self,
        folder: Path,
        engine: str | None = None,
        save: Sequence[int] = (),
        start: Path | None = None,
        seed: int = 1,
    ) -> Run:
        """Losses and weights. A run that goes on begins from other random states, which must not matter."""
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        model = net(self.drop)
        optimizer = self.optimizer(model.parameters())
        scheduler = self.scheduler(optimizer) if self.scheduler else None
        losses = []
        with paceline.join(
            model,
            optimizer,
            F.cross_entropy,
            batch_size=ROWS,
            scheduler=scheduler,
            engine=engine,
            folder=folder,
            keep=100,
            **self.options,
        ) as pace:
            if self.scale:
                pace.run.scaler.scale = self.scale
            if start:
                assert pace.restore(start)
                assert pace.facts == {"seen": pace.num_steps}
            for batch in pace.batches(Noisy(self.noise), EPOCHS):
                losses.append(pace.step(batch))
                if batch.ends_epoch:
                    pace.evaluate(Noisy(0.0), lambda output, target: (output.argmax(1) == target).sum())
                if pace.num_steps in save:
                    pace.facts["seen"] = pace.num_steps
                    pace.save(wait=pace.num_steps % 2 == 0)  # both ways
            average(pace.run, state=True)
            state = [tensor.detach().clone() for tensor in model.state_dict().values()]
            state += [value for value in _leaves(pace.engine.optimizer_state()["state"]) if isinstance(value, Tensor)]
            state += [torch.tensor([pace.run.scaler.scale, optimizer.param_groups[0]["lr"]], dtype=torch.float64)]
        return losses, state


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in _leaves(part)]
    return [tree.clone() if isinstance(tree, Tensor) else tree]


KINDS = {
    "plain": Kind(),
    "dropout": Kind(drop=0.4),
    "randomness in the dataset": Kind(noise=0.5),
    "micro-batches": Kind(options={"accumulate": 3}, drop=0.3),
    "clipped": Kind(options={"clip": 0.1}),
    "decay": Kind(scheduler=lambda o: schedules.StepLR(o, 2, 0.5)),
    "bf16": Kind(options={"precision": "bf16"}),
    "momentum": Kind(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), drop=0.2),
    "adam": Kind(lambda p: torch.optim.Adam(p, lr=0.01), drop=0.2, noise=0.1),
    "one cycle": Kind(
        lambda p: torch.optim.AdamW(p, lr=0.01), lambda o: schedules.OneCycleLR(o, max_lr=0.02, total_steps=STEPS)
    ),
    "nadam": Kind(lambda p: torch.optim.NAdam(p, lr=0.01)),
    "adafactor": Kind(lambda p: torch.optim.Adafactor(p, lr=0.05)),
    "fp16": Kind(
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), options={"precision": "fp16"}, scale=2.0**23, drop=0.2
    ),
}
# how nodes synchronise
METHODS = {
    "server": Kind(lambda p: torch.optim.Adam(p, lr=0.01), options={"exchange": "server"}, drop=0.2),
    "diloco": Kind(lambda p: torch.optim.Adam(p, lr=0.01), options={"exchange": "diloco:2"}, averages=True),
    "lowrank": Kind(options={"exchange": "allreduce:forms=dense", "codec": "feedback/lowrank:1"}, drop=0.2),
    "qsgd": Kind(options={"codec": "qsgd"}, drop=0.2),
}


def same(one: Run, other: Run) -> bool:
    """Bit for bit."""
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def check(kind: Kind, folder: Path, engine: str | None = None) -> list[str]:
    """What is not as it should be, at which step."""
    whole = kind.run(folder / "whole", engine)
    steps, saved = range(1, STEPS + 1), folder / "saved"
    faults = [] if same(whole, kind.run(saved, engine, save=steps)) or kind.averages else ["saving changed the run"]
    for step in steps:
        if kind.averages:  # all other checkpoints would end a period
            whole = kind.run(saved := folder / f"saved {step}", engine, save=[step])
        start = saved / f"checkpoint-{step:08d}"
        losses, state = kind.run(folder / f"again {step}", engine, start=start, seed=100 + step)
        if not same((whole[0][:step] + losses, state), whole):
            faults.append(f"from step {step}: {whole[0][step:]} became {losses}")
    return faults


def apart(folder: Path, rank: int) -> tuple[str, bool]:
    """Processes that see different folders: what is said where only rank 1 sees a checkpoint, and only rank 0."""
    model, told = net(), ""
    with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, batch_size=ROWS) as pace:
        pace.save(folder / "0")
        try:
            pace.restore(folder / str(1 - rank))
        except ValueError as error:
            told = str(error)
        return told, pace.restore(folder / str(rank))


def write(folder: Path, facts: dict[str, Any]) -> None:
    (folder / "faults.json").write_text(json.dumps(facts))
