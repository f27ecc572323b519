"""Nodes of unlike numbers of processes train on shared batches: unlike.py FOLDER."""

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import Plain, build, rows


class Samples:
    def __init__(self):
        self.x, self.y = rows(52, 3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


model = build(Plain)
pace = paceline.join(model, torch.optim.SGD(model.parameters(), 0.1, 0.9), F.cross_entropy, batch_size=24, seed=5)
for batch in pace.batches(Samples(), epochs=3):
    pace.step(batch)
print(f"{pace.row}: {pace.world.local_size} of {pace.world.world_size}\n", end="", flush=True)
if pace.world.rank == 0:
    torch.save(model.state_dict(), Path(sys.argv[1]) / "weights.pt")
