"""Two steps of four drawn, over all nodes, with a layer that sleeps on the last of them: drawn.py FOLDER."""

import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import Plain, build, rows

NAP_S = 0.03


class Slow(Plain):
    def forward(self, x):
        return super().forward(self.nap(x))


class Nap(torch.nn.Module):
    def forward(self, x):
        if pace.world.node == pace.world.num_nodes - 1:
            time.sleep(NAP_S)
        return x


model = build(Slow, dtype=torch.float32)
model.nap = Nap()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
with paceline.join(
    model, optimizer, F.cross_entropy, batch_size=48, folder=Path(sys.argv[1]) / "run", accumulate=2
) as pace:
    world = pace.world
    batch = rows(48 // (world.num_nodes * world.local_size), world.node, torch.float32)
    for _ in range(5):
        pace.step(batch)
    assert not model._forward_hooks, "hooks were left behind"
    assert pace.run.link.watch is None
