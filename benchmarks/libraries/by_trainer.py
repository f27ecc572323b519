"""Trains a model of the benchmarks on one batch by Hugging Face's Trainer: `by_trainer.py MODEL ROWS`, for
`paceline plan`, which ends it after 18 steps."""

import sys

import torch
from transformers import Trainer, TrainingArguments

from paceline_bench.cluster.work import Work


class WithLoss(torch.nn.Module):
    def __init__(self, work):
        super().__init__()
        self.model = work.model()

    def forward(self, x, labels):
        output = self.model(x)
        return {"loss": torch.nn.functional.cross_entropy(output, labels), "logits": output}


if __name__ == "__main__":
    work = Work(sys.argv[1], int(sys.argv[2]))
    rows = [{"x": x, "labels": y} for x, y in zip(work.x, work.y, strict=True)] * 100
    given = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=work.batch,
        max_steps=50,
        optim="sgd",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(WithLoss(work), given, train_dataset=rows).train()
