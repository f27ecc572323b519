"""Trains with some milliseconds of processor time for each row, until the file `enough` is there: slowed.py FOLDER.

With a second argument, the rank of a node, that one's rows come late.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import Plain, build, rows
from paceline.report import host_health

host_health.EVERY_S = 1.0
ROW_S = 0.004
LATE_S = 0.04  # data is late even where another program takes the core


class Samples:
    def __init__(self, late=False):
        self.x, self.y = rows(24 * 8, 3, torch.float32)
        self.late = late

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        time.sleep(LATE_S * self.late)
        return self.x[i], self.y[i]


def loss(output, target):
    end = time.thread_time() + ROW_S * len(target)
    while time.thread_time() < end:
        pass
    return F.cross_entropy(output, target)


def main(folder, late=""):
    model = build(Plain, dtype=torch.float32)
    with paceline.join(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss, batch_size=24, folder=folder) as pace:
        for step, batch in enumerate(pace.batches(Samples(late == os.environ["RANK"]), epochs=1000)):
            pace.step(batch)
            # all must end after the same step
            if step % 8 == 7 and pace.control.all_reduce([float((Path(folder) / "enough").exists())])[0]:
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
