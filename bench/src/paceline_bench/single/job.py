"""A job to plan: one of our models on random images, so that nothing but the step is timed.

paceline plan .../paceline/bench/job.py alexnet 32
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import TensorDataset

import paceline
from paceline_bench.single.contender import made


def main(name: str, batch: str) -> None:
    model, images, labels = made(name, int(batch))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=int(batch)) as pace:
        for rows in pace.batches(TensorDataset(images, labels), epochs=1000):
            pace.step(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
