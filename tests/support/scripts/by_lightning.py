"""Trains by Lightning, which knows nothing of paceline: `by_lightning.py FOLDER [resume] [paceline]`."""

import sys
from pathlib import Path

import lightning as pl
import torch
from of_libraries import Model, Rows, write
from torch.utils.data import DataLoader


def main(folder, more):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.steps = Model(), 0

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def validation_step(self, batch, _):
            self.log("seen", float(len(batch["x"])), reduce_fx="sum", sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

        def on_train_batch_end(self, *_):
            self.steps += 1

        def on_train_end(self):
            seen = float(self.trainer.callback_metrics["seen"])
            write(folder, self.global_rank, self.model, self.trainer.strategy.model, evaluated=seen, steps=self.steps)

    pl.seed_everything(5)
    last = str(folder / "out/last.ckpt") if "resume" in more else None
    saves = pl.pytorch.callbacks.ModelCheckpoint(folder / "out", save_last=True, every_n_epochs=1)
    made = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="paceline" if "paceline" in more else "ddp",
        precision="64-true",
        max_epochs=3 if "resume" in more else 2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
    )
    train, held_out = DataLoader(Rows(80), batch_size=4, shuffle=True), DataLoader(Rows(12), batch_size=4)
    made.fit(Module(), train, held_out, ckpt_path=last)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
