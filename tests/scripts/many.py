"""Trains several cases one after the other, joining anew for each: many.py FOLDER CASE..."""

import json
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from nodes import MODELS, OPTIMIZERS, build, rows

STEPS, BATCH = 5, 21  # 21 rows: no two processes have equally many


def data():
    parts = [rows(BATCH, seed) for seed in range(STEPS)]
    return TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))


def main(folder, *cases):
    for case in cases:
        kind, optimizer, clip, exchange, codec = case.split(",")
        model = build(MODELS[kind])
        stepper = OPTIMIZERS[optimizer](model.parameters())
        with paceline.join(
            model,
            stepper,
            F.cross_entropy,
            batch_size=BATCH,
            clip=float(clip) or None,
            exchange=exchange,
            codec=codec,
        ) as pace:
            losses = [pace.step(batch) for batch in pace.batches(data(), shuffle=False)]
            right = pace.evaluate(data(), lambda output, target: (output.argmax(1) == target).sum())
            pace.save(Path(folder) / f"{case}.safetensors")
            if pace.leader:
                said = {"losses": losses, "right": right, "forms": list(pace.exchange.forms())}
                (Path(folder) / f"{case}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
