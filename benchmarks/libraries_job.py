"""A model trained by a library that knows nothing of paceline; rank 0 writes the seconds of each step.

paceline run [--ddp-off] --plan processes:2 libraries_job.py trainer|lightning MODEL STEPS OUT
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from paceline.registry import find
from paceline_bench.cluster import work

ROWS = {"mlp": 16, "alexnet": 8, "resnet50v2": 4, "vit": 8, "transformer": 2}  # of each process's batch


class Returning(nn.Module):
    """Returns its loss, as models of `transformers` do."""

    def __init__(self, name: str):
        super().__init__()
        torch.manual_seed(0)
        if name == "mlp":
            self.model: nn.Module = nn.Sequential(
                nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
            )
        elif name == "transformer":
            self.model = work.Transformer(work.VOCABULARY, 128, 320, 6, 5)
        elif name == "vit":
            self.model = work.VisionTransformer(224, 256, 6, 4)
        else:
            self.model = find("models", name, work.CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    """Of one sample; what differs between samples costs no step anything."""

    def __init__(self, name: str, count: int):
        self.count = count
        if name == "transformer":
            tokens = torch.randint(0, work.VOCABULARY, (129,))
            self.row = {"x": tokens[:-1], "labels": tokens[1:]}
        else:
            x = torch.randn(32) if name == "mlp" else torch.randn(3, 224, 224)
            self.row = {"x": x, "labels": torch.tensor(1)}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, _: int) -> dict[str, Tensor]:
        return self.row


def by_trainer(name: str, steps: int, ends: list[float]) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Times(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    rows = ROWS[name]
    given = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=rows,
        max_steps=steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        optim="sgd",
    )
    trainer = Trainer(Returning(name), given, train_dataset=Rows(name, 2 * rows * steps), callbacks=[Times()])
    trainer.train()
    return trainer.model_wrapped


def by_lightning(name: str, steps: int, ends: list[float]) -> Any:
    import lightning as pl

    wrapped: list[Any] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Returning(name)

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())

        def on_train_end(self) -> None:
            wrapped.append(self.trainer.strategy.model)  # Lightning takes it off afterwards

    rows = ROWS[name]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Rows(name, 2 * rows * steps), batch_size=rows))
    return wrapped[0]


def main(library: str, name: str, steps: str, out: str) -> None:
    ends: list[float] = []
    wrapped = {"trainer": by_trainer, "lightning": by_lightning}[library](name, int(steps), ends)
    if torch.distributed.get_rank() == 0:
        took = [end - begin for begin, end in itertools.pairwise(ends)]
        Path(out).write_text(json.dumps({"class": type(wrapped).__module__, "seconds": took}))


if __name__ == "__main__":
    main(*sys.argv[1:])
