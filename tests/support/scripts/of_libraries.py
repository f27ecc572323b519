"""The model and the data of the scripts of other libraries, and what each process of them writes."""

from __future__ import annotations

import json

import torch
from torch import nn
from torch.utils.data import Dataset


class Model(nn.Module):
    """Its first layer is sent as factors: 4 rows of 64 + 512 values for 64 x 512."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 3)).to(dtype)

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset):
    def __init__(self, count, dtype=torch.float64):
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(count, 64, generator=generator, dtype=dtype)
        self.y = torch.randint(3, (count,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


def write(folder, rank, model, wrapper, **said):
    """``said``: what the library's own features have given."""
    sums = getattr(wrapper, "_sums", None)
    # factors are tried first: sums of this weight that were made of them
    trials = sum(trial.steps[True] for trial in sums.trials.values()) if sums else 0
    torch.save(model.state_dict(), folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps({"wrapper": type(wrapper).__module__, "trials": trials, **said}))
