"""Trains a model with batch norm over everyone's rows: norms.py FOLDER. Batches of 21 rows, then one of two."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from nodes import IN, OUT, build, rows

STEPS, BATCH = 4, 21


class Normed(nn.Module):
    """Batch norm of images, with other options over rows, and one layer used twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc, self.plain = nn.Linear(8 * IN, 16), nn.BatchNorm1d(16, eps=1e-3, momentum=None, affine=False)
        self.bare, self.head = nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, OUT)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x.view(len(x), 1, 8, IN // 8))))
        x = F.relu(self.plain(self.fc(x.flatten(1) + 0.3)))
        return self.head(self.bare(x) + self.plain(x * 2))


def batches():
    """The last is too small for every process to have rows of it."""
    return [rows(BATCH, seed) for seed in range(STEPS)] + [rows(2, STEPS)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def main(folder):
    model = build(Normed)
    with paceline.join(model, optimizer(model.parameters()), F.cross_entropy, batch_size=BATCH) as pace:
        pace.engine.sync_norm(pace.link)
        x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
        losses = [pace.step(batch) for batch in pace.batches(TensorDataset(x, y), shuffle=False)]
        state = {name: value.clone() for name, value in model.state_dict().items()}
    rank = int(os.environ["RANK"])
    torch.save(state, Path(folder, f"{rank}.pt"))
    Path(folder, f"{rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
