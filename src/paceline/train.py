"""The main job: a named model on a folder of images, or on the embedded sample. Written as a user would."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from paceline import find
from paceline.contract import Ballot
from paceline.data import images, sample
from paceline.session import Pace, join


@dataclass
class Settings:
    """What was asked; None means the model's own default."""

    model: str | None = None
    data: Path | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    momentum: float | None = None
    seed: int = 0
    codec: str = "none"
    exchange: str = "allreduce"
    out: Path | None = None

    def check(self) -> None:
        """Raises ValueError for what cannot be trained, before any process is started."""
        network = find.module("models", self.model_name)
        given = (1, 28, 28) if self.data is None else (3, 224, 224)
        if given != network.INPUT:
            remedy = "add --data FOLDER" if self.data is None else "use --model alexnet"
            raise ValueError(
                f"model {self.model_name!r} takes images of shape {network.INPUT}, "
                f"{self.data or 'the embedded sample'} gives {given}; {remedy}"
            )
        for name, least in (("epochs", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if self.data is not None:
            images.load(self.data)

    @property
    def model_name(self) -> str:
        return self.model or ("small" if self.data is None else "alexnet")


def num_right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).sum()


def run(settings: Settings) -> float:
    """Trains in this process, as one of however many there are. Returns the last test accuracy."""
    network = find.module("models", settings.model_name)
    train, test = sample.load() if settings.data is None else images.load(settings.data, seed=settings.seed)
    torch.manual_seed(settings.seed)
    model = network.build(len(train.classes))
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=network.LEARNING_RATE if settings.lr is None else settings.lr,
        momentum=network.MOMENTUM if settings.momentum is None else settings.momentum,
    )
    pace = join(
        model,
        optimizer,
        torch.nn.functional.cross_entropy,
        batch_size=settings.batch_size or network.BATCH_SIZE,
        seed=settings.seed,
        metric=num_right,
        codec=settings.codec,
        exchange=settings.exchange,
        folder=settings.out,
    )
    with pace:
        return _epochs(pace, train, test, settings.epochs or network.EPOCHS, settings.out)


def _epochs(pace: Pace, train: Any, test: Any, epochs: int, out: Path | None) -> float:
    console = Console(quiet=not pace.leader, highlight=False, soft_wrap=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    accuracy = 0.0
    options: dict[str, Any] = {"transient": True, "disable": not sys.stdout.isatty(), "refresh_per_second": 4}
    with Progress(*columns, console=console, **options) as progress:
        bar, tally = progress.add_task("first step", total=None), Tally()
        for batch in pace.batches(train, epochs=epochs):
            pace.step(batch)
            tally.add(pace.agreement.ballot)
            words = f"epoch {batch.epoch + 1}/{epochs}: {tally}"
            progress.update(
                bar, advance=1, total=epochs * batch.num_steps if batch.num_steps else None, description=words
            )
            if batch.ends_epoch:
                accuracy = pace.evaluate(test)
                pace.record.write("epoch", epoch=batch.epoch, test_accuracy=accuracy, **vars(tally))
                console.print(f"{words}, test accuracy {accuracy:.1%}")
                tally = Tally()
    if out:
        pace.save(out / "weights.safetensors")
    return accuracy


class Tally:
    """Sums over the steps of an epoch."""

    def __init__(self) -> None:
        self.start, self.rows, self.right, self.loss_sum = time.perf_counter(), 0.0, 0.0, 0.0

    def add(self, ballot: Ballot) -> None:
        self.rows += ballot.weight
        self.right += ballot.metric_sum
        self.loss_sum += ballot.loss_sum

    def __str__(self) -> str:
        per_s = self.rows / (time.perf_counter() - self.start)
        return f"loss {self.loss_sum / self.rows:.4f}, accuracy {self.right / self.rows:.1%}, {per_s:.0f} images/s"
