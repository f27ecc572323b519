"""Trains until it is killed; each process says its pid and each step: endless.py FOLDER."""

import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import build, rows

model = build(dtype=torch.float32)
pace = paceline.join(model, torch.optim.SGD(model.parameters(), lr=1e-4), F.cross_entropy, batch_size=24)
world = pace.world
here = Path(sys.argv[1]) / f"{world.node}.{world.local_rank}"
batch = rows(24 // (world.num_nodes * world.local_size), world.node, torch.float32)
for step in range(1_000_000):
    pace.step(batch)
    if step == 20:
        aside = here.with_name(here.name + ".part")
        aside.write_text(str(os.getpid()))
        aside.replace(here)
