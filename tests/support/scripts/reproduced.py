"""Trains a few steps so that the number of nodes changes no bit, and writes the weights: reproduced.py FILE."""

import sys

import torch
from safetensors.torch import save_file
from torch.utils.data import TensorDataset

import paceline

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 3))
dataset = TensorDataset(torch.randn(90, 20), torch.randint(0, 3, (90,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with paceline.join(
    model, optimizer, torch.nn.functional.cross_entropy, batch_size=30, clip=0.5, reproducible=True
) as pace:
    for batch in pace.batches(dataset, epochs=2):
        pace.step(batch)
    if pace.leader:
        save_file(pace.engine.state(), sys.argv[1])
