"""The same training by DistributedDataParallel under torchrun, with a checkpoint every SAVE_EVERY steps.

    torchrun ... -m paceline_bench.chaos.ddp FOLDER STEPS

A worker that is started again goes on from the newest checkpoint, as torchrun's users write it.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from paceline_bench.chaos import training
from paceline_bench.chaos.journal import Journal

dist: Any = torch.distributed  # its stubs leave out what we use


def main(folder: str, steps: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    journal = Journal(Path(folder), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), training.node(), 0)
    net, optimizer = training.build()
    kept = Path(folder) / "checkpoint"
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        journal.step = state["step"]
    model = DistributedDataParallel(net)
    source = training.Samples()
    loss_of = training.slowly(lambda mine: journal.note(tried=journal.step, rows=mine))
    while journal.step < int(steps):
        mine = training.rows(journal.step % (training.STEPS - 1))[rank::size]  # whole batches: batch norm needs rows
        optimizer.zero_grad()
        loss = loss_of(model(source.x[mine]), source.y[mine])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        journal.note(applied=journal.step, loss=float(loss.detach()), mark=0, nodes=size)
        journal.step += 1
        if journal.step % training.SAVE_EVERY == 0 and rank == 0:
            part = kept.with_suffix(".part")
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": journal.step}, part)
            part.replace(kept)
    journal.note(ended=journal.step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
