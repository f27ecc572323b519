"""Each process gathers and reduces tensors of its rank: gathered.py FOLDER."""

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with paceline.join(model, optimizer, F.cross_entropy, batch_size=4) as pace:
    rank = pace.world.rank
    found = {
        "rows": pace.gather(torch.full((rank + 1, 2), rank)),
        "rank": pace.gather(torch.tensor(rank)),
        **{name: pace.all_reduce(torch.tensor([rank, rank + 1]), name) for name in ("sum", "max", "min")},
    }
    x, y = torch.arange(21.0).view(7, 3), torch.arange(7) % 2
    samples = torch.utils.data.TensorDataset(x, y)
    found["sums"] = pace.evaluate(samples, lambda output, y: (torch.stack([y.sum(), (1 - y).sum()]), None), rows=2)
    for name, call, tensor in (
        ("types", pace.gather, torch.ones(2, 2, dtype=torch.float32 if rank else torch.int64)),
        ("shapes", pace.all_reduce, torch.ones(rank + 1)),
    ):
        try:
            call(tensor)
        except ValueError as error:
            found[name] = str(error)
torch.save(found, Path(sys.argv[1], f"{rank}.pt"))
