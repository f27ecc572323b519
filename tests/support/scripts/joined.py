"""A few steps over all nodes, one of which may fail: joined.py FOLDER [FAILING_NODE].

Every process keeps the weights it has: node 1's are 1.pt, 1.1.pt and so on.
"""

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import build, rows

model = build(dtype=torch.float32)
pace = paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), F.cross_entropy, batch_size=24)
world = pace.world
batch = rows(24 // (world.num_nodes * world.local_size), world.rank, torch.float32)
for step in range(12):
    if step == 6 and str(world.node) in sys.argv[2:]:
        raise ValueError("the data of this node ran out")
    pace.step(batch)
part = f"process {world.local_rank} of {world.local_size} of " if world.local_size > 1 else ""
print(f"{part}node {world.node} of {world.num_nodes} is done\n", end="", flush=True)
place = f"{world.node}.{world.local_rank}" if world.local_rank else f"{world.node}"
torch.save(model.state_dict(), Path(sys.argv[1]) / f"{place}.pt")
