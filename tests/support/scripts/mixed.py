"""Two nodes whose weights differ: mixed.py FOLDER instructions|threads|planted. The first two by how they compute.

instructions    node 0 with all that its processor can do, node 1 with the least; one thread each
threads         node 0 with two of them, node 1 with one
"""

import os
import sys

NODE = int(os.environ["GROUP_RANK"])
FOLDER, KIND = sys.argv[1:]
if KIND == "instructions" and NODE:  # read when torch is loaded
    os.environ.update(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE", ONEDNN_MAX_CPU_ISA="SSE41")

from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import paceline  # noqa: E402
from nodes import Plain, Wide, build, rows  # noqa: E402


class Centred(torch.optim.SGD):
    """Takes each gradient's mean away: a sum of 65,536, in as many parts as there are threads, or lanes of a vector."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad -= parameter.grad.mean()
        return super().step(closure)


STEPS = 30
model = build(Plain if KIND == "planted" else Wide, torch.float32)
kind = torch.optim.SGD if KIND == "planted" else Centred
optimizer = kind(model.parameters(), lr=0.02, momentum=0.9)
engine = {"planted": None, "instructions": "threads:1", "threads": f"threads:{2 - NODE}"}[KIND]
folder = Path(FOLDER) / "run"
with paceline.join(model, optimizer, F.cross_entropy, batch_size=48, engine=engine, folder=folder) as pace:
    world = pace.world
    batch = rows(48 // world.world_size, world.rank, torch.float32)
    for step in range(STEPS):
        if KIND == "planted" and step == 3 and NODE and world.local_rank == 0:
            with torch.no_grad():
                model.second.weight[7, 5] += 1e-3
        pace.step(batch)
    state = {name: value.clone() for name, value in model.state_dict().items()}
if world.local_rank == 0:
    torch.save(state, Path(FOLDER) / f"{NODE}.pt")
