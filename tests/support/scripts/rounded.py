"""Trains in bfloat16: rounded.py FOLDER."""

import sys
from pathlib import Path

import torch
from test_numerics import ROWS, data, net
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

model = net(256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = TensorDataset(*(torch.cat(parts) for parts in zip(*data(6), strict=True)))
with paceline.join(model, optimizer, F.cross_entropy, batch_size=ROWS, precision="bf16") as pace:
    losses = [pace.step(batch) for batch in pace.batches(rows, shuffle=False)]
    if pace.leader:
        said = {"losses": losses, "weights": model.state_dict(), "forms": list(pace.exchange.forms())}
        torch.save(said, Path(sys.argv[1]) / "rounded.pt")
