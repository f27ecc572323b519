"""Trains until a process stands still in the middle of a step: stuck.py FOLDER NODE STEP LOCAL_RANK.

Deadlines are short, so that the tests are, but with DEADLINES=real. Each process says its pid when it is training;
without NODE, it trains on.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import build, rows
from paceline.elastic import failure_detector
from paceline.report import activity

if os.environ.get("DEADLINES") != "real":
    activity.MIN_S = failure_detector.LIMIT_S = float(os.environ.get("LEAST_S", "2.5"))
    activity.BETWEEN_S, activity.FACTOR, failure_detector.GRACE_S = 4.0, 2.0, 0.5


def asleep(folder):
    (Path(folder) / "asleep").touch()
    time.sleep(1000)


def main(folder, node="-1", at="0", local="0"):
    model, step = build(dtype=torch.float32), 0

    def loss(output, target):
        if (world.node, step, world.local_rank) == (int(node), int(at), int(local)):
            asleep(folder)
        return F.cross_entropy(output, target)

    with paceline.join(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss, batch_size=24, folder=folder) as pace:
        world = pace.world
        here = Path(folder) / f"{world.node}.{world.local_rank}"
        batch = rows(24 // world.world_size, world.node, torch.float32)
        for step in range(1_000_000):
            pace.step(batch)
            if step == 15:
                aside = here.with_name(here.name + ".part")
                aside.write_text(str(os.getpid()))
                aside.replace(here)
            # all must end after the same step
            if step % 8 == 7 and pace.control.all_reduce([float((Path(folder) / "enough").exists())])[0]:
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
