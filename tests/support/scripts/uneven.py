"""Two nodes of unlike speed that average every four steps, until a trial ends them: uneven.py FOLDER."""

import atexit
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import build, rows

model = build(dtype=torch.float32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
pace = paceline.join(model, optimizer, F.cross_entropy, batch_size=8, exchange="local_sgd:4")
node, steps = pace.world.node, 0
atexit.register(lambda: Path(sys.argv[1], f"{node}.steps").write_text(str(steps)))
for _ in range(500):
    steps += 1
    time.sleep(0.002 if node else 0.02)
    pace.step(rows(4, node, torch.float32))
