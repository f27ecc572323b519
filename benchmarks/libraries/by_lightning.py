"""Trains a model of the benchmarks on one batch by Lightning: `by_lightning.py MODEL ROWS`, for `paceline plan`, which
ends it after 18 steps."""

import sys

import lightning
import torch

from paceline_bench.cluster.work import Work


class Module(lightning.LightningModule):
    def __init__(self, work):
        super().__init__()
        self.model, self.work = work.model(), work

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return self.work.sgd(self)


if __name__ == "__main__":
    work = Work(sys.argv[1], int(sys.argv[2]))
    rows = list(zip(work.x, work.y, strict=True)) * 100
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=50,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(work), torch.utils.data.DataLoader(rows, work.batch))
