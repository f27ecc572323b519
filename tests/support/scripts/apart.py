"""Two nodes that compute in unlike rows stop and go on: apart.py FOLDER."""

import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from nodes import Tied, build, rows

NODE = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
STEPS, BATCH = 5, 12
WORDS = {"batch_size": BATCH, "engine": f"threads:{1 + NODE}"}


def train(begin, end):
    """The state after step ``end``, from the checkpoint of step ``begin``."""
    model = build(Tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(*rows(STEPS * BATCH, 1))
    with paceline.join(model, optimizer, F.cross_entropy, folder=FOLDER / "run", **WORDS) as pace:
        if begin:
            assert pace.restore()
        for batch in pace.batches(data):
            pace.step(batch)
            if pace.num_steps == end:
                break
        if end < STEPS:
            pace.save()
        forms = list(pace.exchange.forms())
        return {name: value.clone() for name, value in model.state_dict().items()}, forms


def buffers():
    """Of types that network libraries do not know, each with this node's number in it."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("turns", torch.full((3,), complex(NODE, 1), dtype=torch.complex64))
    model.register_buffer("wide", torch.full((2, 2), complex(NODE, 1), dtype=torch.complex128).T)
    model.register_buffer("count", torch.tensor(NODE, dtype=torch.int16))
    model.register_buffer("none", torch.zeros(0, dtype=torch.int16))
    model.register_buffer("on", torch.tensor([NODE == 0, NODE == 1]))
    with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, **WORDS):
        return {name: value.clone() for name, value in model.named_buffers()}


said = {"buffers": buffers()}
said["half"], _ = train(0, 3)
said["resumed"], said["forms"] = train(3, STEPS)
said["whole"], _ = train(0, STEPS)
torch.save(said, FOLDER / f"{NODE}.pt")
