"""Trains over a real link with updates that wait and with updates that do not: ahead.py FOLDER."""

import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from nodes import MODELS, build, rows

STEPS, BATCH = 6, 21
CASES = {
    "plain": {},
    "twice": {"accumulate": 2},
    "sometimes": {"shares": [1, 4, 2]},
    "tied": {"codec": "half"},
    "own": {"shares": [0, 4, 2]},
}


def data():
    parts = [rows(BATCH, seed) for seed in range(STEPS)]
    return TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))


def train(kind, overlap, folder=None, **options):
    model = build(MODELS.get(kind, MODELS["plain"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if "shares" in options:
        options["shares"] = options["shares"][: int(os.environ["WORLD_SIZE"])]
    pace = paceline.join(
        model,
        optimizer,
        F.cross_entropy,
        batch_size=BATCH,
        scheduler=scheduler,
        overlap=overlap,
        folder=folder,
        exchange="allreduce:forms=bytes",
        **options,
    )
    losses = []
    for batch in pace.batches(data(), shuffle=False):
        losses.append(pace.step(batch))
        if kind == "own":
            losses.append(once_more(pace, model, batch))
        if batch.step == 3:
            right = pace.evaluate(data(), lambda output, target: (output.argmax(1) == target).sum())
            if folder:
                pace.save()
    with pace:
        pass
    return {"losses": losses, "right": right, "state": {k: v.clone() for k, v in model.state_dict().items()}}


def once_more(pace, model, batch):
    """A step of one's own on the same batch, while the update of the last one is still coming."""
    if (mine := pace.rows(batch)) is not None:
        pace.backward(F.cross_entropy(model(mine[0]), mine[1]))
    return pace.update()


def main(folder):
    said = {}
    for kind, options in CASES.items():
        for overlap in ("backward", "forward"):
            kept = Path(folder) / f"{kind}-{overlap}" if kind == "plain" else None
            said[f"{kind} {overlap}"] = train(kind, overlap, kept, **options)
    rank = os.environ["RANK"]
    torch.save(said, Path(folder) / f"{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
