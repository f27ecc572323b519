"""Every process draws weights of its own, some of which do not train; what each then has: frozen.py FOLDER."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline

torch.manual_seed(int(os.environ.get("RANK", "0")))
model = nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
model[1].requires_grad_(False)
model[2].weight.requires_grad_(False)
nn.init.normal_(model[2].weight)
first = {name: value.clone() for name, value in model.state_dict().items()}
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
pace = paceline.join(model, optimizer, F.cross_entropy, batch_size=8)
torch.save([first, model.state_dict()], Path(sys.argv[1]) / f"{pace.world.rank}.pt")
