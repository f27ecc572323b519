"""Two nodes over a real link: the first with stages on two devices, the second with the whole model: staged.py FOLDER.

Each way of sending trains, saves in the middle, and once more from there with the nodes' parts exchanged."""

import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import build, rows
from two_devices import ASKED, PLACES, on

STEPS, MIDDLE, BATCH = 6, 3, 24
METHODS = {
    "dense": {"exchange": "allreduce:forms=dense"},
    "factors": {"exchange": "allreduce:forms=factors"},
    "server": {"exchange": "server"},
    "diloco": {"exchange": "diloco:2", "codec": "feedback/topk:keep=0.2"},
    "lowrank": {"codec": "feedback/lowrank:rank=2", "exchange": "allreduce:forms=dense"},
}


def join(kind, model, folder, staged):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return paceline.join(
        model,
        optimizer,
        F.cross_entropy,
        batch_size=BATCH,
        folder=folder,
        shares="equal",
        clip=0.05,
        engine=f"pipeline:2,micros=4,cut=second,devices={ASKED}" if staged else "sequential",
        **METHODS[kind],
    )


def made(staged):
    return on(build()) if staged else build()


def train(pace, steps):
    for step in steps:
        x, y = rows(BATCH, step)
        pace.step((x, y))


def state(model):
    return {name: each.cpu() for name, each in model.state_dict().items()}


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    found = {}
    for kind in METHODS:
        model = made(rank == 0)
        with join(kind, model, folder / kind, rank == 0) as pace:
            train(pace, range(MIDDLE))
            pace.save()
            train(pace, range(MIDDLE, STEPS))
            places = {str(each.device) for each in model.parameters()}
            assert len(places) == (len(set(PLACES)) if rank == 0 else 1), places
        found[kind] = state(model)
        model = made(rank == 1)
        with join(kind, model, folder / kind, rank == 1) as pace:
            assert pace.restore()
            train(pace, range(MIDDLE, STEPS))
        found[f"{kind} again"] = state(model)
    torch.save(found, folder / f"{rank}.pt")
