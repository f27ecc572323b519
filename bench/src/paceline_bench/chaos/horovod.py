"""The same training by Horovod elastic, with a commit to memory after every step.

    horovodrun --gloo --min-np 2 ... -m paceline_bench.chaos.horovod FOLDER STEPS

Needs the package horovod (0.28.1), which nothing here installs.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

from paceline_bench.chaos import training
from paceline_bench.chaos.journal import Journal


def main(folder: str, steps: str) -> None:
    torch.set_num_threads(1)
    hvd: Any = importlib.import_module("horovod.torch")
    hvd.init()
    own = int(os.environ["HOROVOD_HOSTNAME"].rpartition(".")[2]) - 1  # its address, as all of the cluster's
    journal = Journal(Path(folder), 0, f"node{own}", 0)
    net, optimizer = training.build()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    source = training.Samples()
    loss_of = training.slowly(lambda mine: journal.note(tried=journal.step, rows=mine))

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        while state.step < int(steps):
            journal.step = state.step
            whole = training.rows(journal.step % (training.STEPS - 1))  # whole batches: batch norm needs rows
            mine = whole[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            loss = loss_of(net(source.x[mine]), source.y[mine])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            journal.note(applied=journal.step, loss=float(loss.detach()), mark=0, nodes=hvd.size())
            state.step += 1
            state.commit()

    train(hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0))
    journal.note(ended=journal.step)


if __name__ == "__main__":
    main(*sys.argv[1:])
