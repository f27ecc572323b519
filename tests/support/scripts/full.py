"""Saves to a full disk, waiting or not: is told, goes on, saves when there is room, ends in one line: full.py RUN."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline

run = Path(sys.argv[1])
torch.manual_seed(0)
model = nn.Linear(256, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with paceline.join(model, optimizer, F.cross_entropy, batch_size=8) as pace:

    def fill():
        with (run / "junk").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass

    def step():
        pace.step((torch.ones(8 // pace.world.local_size, 256), torch.zeros(8 // pace.world.local_size).long()))

    def refused(work):
        try:
            work()
        except OSError as error:
            told = [words.decode() for words in pace.control.all_gather(str(error).encode())]
            assert told[0] == told[-1], told
        else:
            raise AssertionError("the disk was not full")

    def until_told():
        for _ in range(100_000):
            step()

    step()
    pace.save(run)
    pace.once(fill)
    step()
    refused(lambda: pace.save(run))
    pace.save(run, wait=False)
    refused(until_told)
    step()
    pace.once((run / "junk").unlink)
    pace.save(run)
    print("saved", flush=True)
    pace.once(fill)
    step()
    pace.save(run, wait=False)
