"""The job of `paceline train`: trains a named model on images (folder or shards) or on the embedded sample.

It is written like a user's script. The launcher starts python -m paceline.train.run SETTINGS (as JSON); the folder of
the run is PACELINE_FOLDER.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from paceline import registry
from paceline.data import images, sample
from paceline.data.encoded_images import EncodedImages
from paceline.errors import CheckpointError, LinkError
from paceline.messages import Vote
from paceline.pace import Pace
from paceline.report.log import log
from paceline.session import join
from paceline.train import input_advice, lr_schedule
from paceline.train.lars import LARS
from paceline.train.network import Network, network
from paceline.train.settings import Settings

GREY, COLOUR = (1, 28, 28), (3, 224, 224)  # the sample's images, and all others
_joined: list[bool] = []
RATES = {"adam": 0.001, "adamw": 0.001}


def sources(settings: Settings) -> tuple[Any, Any]:
    """The training and the test data. Raises ValueError."""
    if settings.data is None:
        return sample.load()
    return images.load(settings.data, settings.test_fraction, seed=settings.seed, skip_broken=settings.skip_broken)


def check(settings: Settings) -> None:
    """Raises ValueError for settings that cannot be trained, before any process is started."""
    net = network(settings.model_name)
    image_shape = GREY if settings.data is None else COLOUR
    if net.input and image_shape != net.input:
        remedy = "add --data FOLDER" if settings.data is None else "use --model alexnet"
        raise ValueError(
            f"model {settings.model_name!r} takes images of shape {net.input}, "
            f"{settings.data or 'the embedded sample'} gives {image_shape}; {remedy}"
        )
    if settings.device not in ("auto", "cpu"):
        try:
            torch.empty(0, device=settings.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {settings.device}: {str(error).splitlines()[0]}; use auto or cpu") from None
    for room in ("exchange", "codec"):
        registry.parse(room, getattr(settings, room))


def check_same(current: dict[str, Any], saved: dict[str, Any], run: str) -> None:
    """Raises ValueError where a run's checkpoints were made with other options or other data than this training."""
    changes = {
        "classes": "the classes are {now}, and were {before}: a label means something else now",
        "images": "there are {now} images to train on and to test on, and were {before}: some would swap "
        "sides; restore the missing ones, or begin a new run, which leaves unreadable ones out by --skip-broken",
        "asked": "its options are {now}, and were {before}",
    }
    for name, text in changes.items():
        if name in saved and name in current and saved[name] != current[name]:
            what = text.format(now=current[name] or "the defaults", before=saved[name] or "the defaults")
            raise ValueError(
                f"the checkpoints in {run} are of another run: {what}; give another --out, or the options of that run"
            )


def num_right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).sum()


def make_optimizer(settings: Settings, net: Network, model: torch.nn.Module, batch_size: int) -> torch.optim.Optimizer:
    lr = settings.lr if settings.lr is not None else RATES.get(settings.optimizer, net.learning_rate)
    lr = lr_schedule.scaled(lr, batch_size, net.batch_size, settings.lr_scaling)
    momentum = net.momentum if settings.momentum is None else settings.momentum
    weights, decay = list(model.parameters()), settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(weights, lr, momentum, weight_decay=decay)
    if settings.optimizer == "lars":
        return LARS(weights, lr, momentum, decay)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(weights, lr, weight_decay=decay)


def run(settings: Settings) -> dict[str, Any]:
    """Trains in this process, which may be one of several. Returns the result of the last epoch."""
    check(settings)
    net = network(settings.model_name)
    train, test = sources(settings)
    torch.manual_seed(settings.seed)
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    model = net.build(len(train.classes)).to(device)
    batch_size, epochs = settings.batch_size or net.batch_size, settings.epochs or net.epochs
    optimizer = make_optimizer(settings, net, model, batch_size)
    steps = -(-len(train) // batch_size)
    # warm-up from the unscaled rate to the scaled one, where it was scaled up (Goyal et al. 2017)
    start = min(1.0, lr_schedule.scaled(1.0, net.batch_size, batch_size, settings.lr_scaling))
    scheduler = lr_schedule.make(
        optimizer,
        warmup_steps=round(settings.warmup * steps),
        decay=settings.decay,
        total_steps=epochs * steps,
        start=start if settings.lr_scaling != "none" else None,
    )
    pace = join(
        model,
        optimizer,
        torch.nn.functional.cross_entropy,
        batch_size=batch_size,
        clip=settings.clip,
        accumulate=settings.accumulate,
        precision=settings.precision,
        scheduler=scheduler,
        batch_norm=settings.batch_norm,
        seed=settings.seed,
        metric=num_right,
        codec=settings.codec,
        exchange=settings.exchange,
        keep=settings.keep,
        shares=settings.shares,
    )
    _joined.append(True)
    with pace:
        shape = list(net.input or (GREY if settings.data is None else COLOUR))
        compared: dict[str, Any] = {"asked": settings.fixed}
        if settings.data is None or images.divides(settings.data):
            compared["images"] = [len(train), len(test)]
        facts = {"model": net.name, "classes": list(train.classes), "input": shape, **compared}
        pace.facts = facts
        resumed = pace.folder and pace.restore()
        if resumed:
            check_same(facts, pace.facts, str(pace.folder))
        if resumed and pace.leader and not settings.json:
            upcoming = "all epochs are done" if pace.epoch >= epochs else f"epoch {pace.epoch + 1} of {epochs} is next"
            print(f"resumed after step {pace.num_steps}: {upcoming}")
        result = _epochs(pace, train, test, epochs, batch_size, settings)
        if pace.folder:
            pace.export(pace.folder / "weights.safetensors")
    return result


def _epochs(pace: Pace, train: Any, test: Any, epochs: int, batch_size: int, settings: Settings) -> dict[str, Any]:
    quiet = settings.json or not pace.leader
    console = Console(quiet=quiet, highlight=False, soft_wrap=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    options: dict[str, Any] = {"transient": True, "disable": quiet or not sys.stdout.isatty(), "refresh_per_second": 4}
    result: dict[str, Any] = {"epochs": pace.epoch}
    if pace.epoch and not pace.next_step:  # resumed at the end of an epoch, whose test may be missing
        result["test_accuracy"] = pace.evaluate(test)
        console.print(f"epoch {pace.epoch}/{epochs}: test accuracy {result['test_accuracy']:.1%}")
    with Progress(*columns, console=console, **options) as progress:
        bar, totals = progress.add_task("first step", total=None), EpochSums()
        waited_s, begin, first = 0.0, time.perf_counter(), pace.num_steps
        for batch in pace.batches(train, epochs=epochs, workers=settings.workers):
            pace.step(batch)
            totals.add(pace.agreement.vote)
            waited_s += batch.wait_s
            steps = batch.num_steps or 1
            done = batch.epoch * steps + batch.step + 1
            text = f"epoch {batch.epoch + 1}/{epochs}: {totals}"
            progress.update(bar, completed=done, total=epochs * steps, description=text)
            every = settings.save_every
            if pace.folder and (batch.ends_epoch or (every and pace.num_steps % every == 0)):
                pace.save(wait=False)
            if batch.ends_epoch:
                sums = totals.sums()
                accuracy = pace.evaluate(test)
                result = {"epochs": batch.epoch + 1, "test_accuracy": accuracy, **sums}
                pace.record.write("epoch", epoch=batch.epoch, **result)
                console.print(f"{text}, test accuracy {accuracy:.1%}")
                totals = EpochSums()
    num_steps = pace.num_steps - first
    if pace.leader and isinstance(train, EncodedImages) and num_steps:
        with contextlib.suppress(OSError, RuntimeError):  # it packs some images, which may need more room
            step_s = (time.perf_counter() - begin) / num_steps
            hint = _input_hint(train, waited_s / num_steps, step_s, batch_size, settings)
            pace.record.write("hint", text=hint)
            console.print(hint)
    if settings.json and pace.leader:
        print(json.dumps({"run": str(pace.folder) if pace.folder else None, "engine": pace.row, **result}))
    return result


def _input_hint(train: EncodedImages, wait_s: float, total_s: float, rows: int, settings: Settings) -> str:
    """Whether packing or more decoding would help, by measurement; not measured where steps hardly wait."""
    costs = input_advice.Costs(0.0, 0.0, 0.0)
    if wait_s > input_advice.MIN_GAIN * total_s:
        with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
            costs = input_advice.measure(train, Path(scratch))
    cores = len(os.sched_getaffinity(0))
    return input_advice.advise(
        wait_s, total_s - wait_s, rows, costs, settings.workers or train.threads, cores, train.packed
    )


class EpochSums:
    """Sums over the steps of an epoch."""

    def __init__(self) -> None:
        self.start, self.rows, self.right, self.loss_sum = time.perf_counter(), 0.0, 0.0, 0.0

    def add(self, vote: Vote) -> None:
        self.rows += vote.weight
        self.right += vote.metric_sum
        self.loss_sum += vote.loss_sum

    def sums(self) -> dict[str, float]:
        rows, seconds = self.rows, time.perf_counter() - self.start
        return {
            "loss": self.loss_sum / rows,
            "accuracy": self.right / rows,
            "per_s": rows / seconds,
            "seconds": seconds,
        }

    def __str__(self) -> str:
        sums = self.sums()
        return f"loss {sums['loss']:.4f}, accuracy {sums['accuracy']:.1%}, {sums['per_s']:.0f} images/s"


def main() -> None:
    try:
        run(Settings.from_json(sys.argv[1] if len(sys.argv) > 1 else "{}"))
    except (ValueError, OSError) as error:
        if isinstance(error, LinkError | CheckpointError):
            raise  # these have messages of their own
        # before `join` all processes raise the same error; later an error may be in one process's samples alone
        if os.environ.get("LOCAL_RANK", "0") == "0" or _joined:
            log.error(str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
