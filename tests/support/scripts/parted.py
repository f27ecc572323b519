"""Trains slowly, and says each step as it is taken: parted.py FOLDER COUNT."""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import Plain, build, rows

NAP_S = 0.05

folder, count = Path(sys.argv[1]), int(sys.argv[2])
model = build(Plain)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
with paceline.join(
    model, optimizer, F.cross_entropy, batch_size=24, folder=folder / "run", engine="sequential"
) as pace:
    for step in range(count):
        time.sleep(NAP_S)
        pace.step(rows(24 // pace.world.num_nodes, step))
        with (folder / f"steps{os.environ['RANK']}").open("a") as said:
            print(step, pace.world.num_nodes, file=said)
