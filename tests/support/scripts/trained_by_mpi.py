"""Trains over MPI, joining anew for each case; all ranks keep their weights: trained_by_mpi.py FOLDER CASE...

A case is MODEL,CODEC,SHARES. These are equal, or unlike: rank r has r parts of a batch, and rank 0 no row at all.
"""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from nodes import MODELS, OPTIMIZERS, build, rows
from paceline.link import mpi

STEPS, BATCH = 5, 21  # 21 rows: not everyone has equally many
folder, *cases = sys.argv[1:]
parts = [rows(BATCH, seed) for seed in range(STEPS)]
data = TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
for case in cases:
    name, codec, shares = case.split(",")
    model = build(MODELS[name])
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    dealt = range(int(os.environ["WORLD_SIZE"])) if shares == "unlike" else shares
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=BATCH, codec=codec, shares=dealt) as pace:
        assert isinstance(pace.run.members.bare, mpi.Link)
        for batch in pace.batches(data, shuffle=False):
            pace.step(batch)
        save_file(model.state_dict(), Path(folder, f"{case}.{pace.world.node}.safetensors"))
