"""Two nodes whose weights differ: mixed.py FOLDER arithmetic|planted. The first by what they compute with."""

import os
import sys

NODE = int(os.environ["GROUP_RANK"])
FOLDER, KIND = sys.argv[1:]
if KIND == "arithmetic" and NODE:  # read when torch is loaded
    os.environ.update(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE", ONEDNN_MAX_CPU_ISA="SSE41")

from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import paceline  # noqa: E402
from nodes import build, rows  # noqa: E402

STEPS = 30
model = build(dtype=torch.float32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
engine = f"threads:{2 - NODE}" if KIND == "arithmetic" else None
folder = Path(FOLDER) / "run"
with paceline.join(model, optimizer, F.cross_entropy, batch_size=48, engine=engine, folder=folder) as pace:
    world = pace.world
    batch = rows(48 // world.size, world.rank, torch.float32)
    for step in range(STEPS):
        if KIND == "planted" and step == 3 and NODE and world.local_rank == 0:
            with torch.no_grad():
                model.second.weight[7, 5] += 1e-3
        pace.step(batch)
    state = {name: value.clone() for name, value in model.state_dict().items()}
if world.local_rank == 0:
    torch.save(state, Path(FOLDER) / f"{NODE}.pt")
