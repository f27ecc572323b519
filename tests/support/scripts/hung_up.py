"""Trains for 200 steps of 20 ms or more, in a run of its own folder: hung_up.py FOLDER."""

import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import build, rows

folder = Path(sys.argv[1])
model = build(dtype=torch.float32)
sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
with paceline.join(model, sgd, F.cross_entropy, batch_size=24, folder=folder / "run") as pace:
    node = pace.world.node
    batch = rows(12, node, torch.float32)
    while pace.num_steps < 200:
        pace.step(batch)
        time.sleep(0.02)
        (folder / f"steps.{node}").write_text(str(pace.num_steps))
