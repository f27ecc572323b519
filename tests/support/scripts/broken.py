"""In step 2 the last rows alone make the first layer's output NaN: broken.py FOLDER."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline

folder = Path(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
# a finite input whose products overflow
model[0].weight.data *= 1e3
rows = torch.randn(48, 8)
rows[-1] = 1e37
data = torch.utils.data.TensorDataset(rows, torch.arange(48) % 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with paceline.join(model, optimizer, F.cross_entropy, batch_size=16, folder=folder / "run") as pace:
    for batch in pace.batches(data, shuffle=False):
        if batch.step == 2:
            pace.save()
            before = [tensor.clone() for tensor in model.state_dict().values()]
        try:
            pace.step(batch)
        except FloatingPointError:
            after = [tensor.clone() for tensor in model.state_dict().values()]
            if pace.leader:
                torch.save({"before": before, "after": after}, folder / "weights.pt")
            raise
