"""Nodes that kill themselves in the middle of training: outlived.py FOLDER NODE:STEP:WHERE..., by their first ranks.

WHERE: forward; backward, while pieces leave; vote, when all have arrived; evaluate. ``sync`` in place of one of these
words: batch norm over everyone.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import OPTIMIZERS, Normed, Plain, build, rows

BATCH, COUNT, EPOCHS = 24, 24 * 5 + 7, 2
NODE, LOCAL = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))


class Samples:
    def __init__(self):
        self.x, self.y = rows(COUNT, 3)

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main(folder, *words):
    fates = {}
    for word in words:
        if word != "sync":
            node, step, where = word.split(":")
            fates[int(node), int(step)] = where
    model = build(Normed if "sync" in words else Plain)
    steps = [0]

    def here(where):
        if fates.get((NODE, steps[0])) == where and LOCAL == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def loss(output, target):
        here("forward")
        return F.cross_entropy(output, target)

    def metric(output, target):
        here("evaluate")
        return target.double().sum()

    with paceline.join(
        model,
        OPTIMIZERS["momentum"](model.parameters()),
        loss,
        batch_size=BATCH,
        seed=3,
        folder=folder,
        batch_norm="sync" if "sync" in words else "local",
    ) as pace:
        vote = getattr(pace.exchange, "exchange", pace.exchange).agree

        def agree(ballot):
            here("vote")
            return vote(ballot)

        getattr(pace.exchange, "exchange", pace.exchange).agree = agree
        model.first.bias.register_hook(lambda grad: here("backward"))
        losses = []
        for batch in pace.batches(Samples(), epochs=EPOCHS):
            losses.append(pace.step(batch))
            steps[0] += 1
        counted = pace.evaluate(Samples(), metric)
        pace.save()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        leader = pace.leader
    torch.save(state, Path(folder) / f"{NODE}-{LOCAL}.pt")
    said = {"losses": losses, "counted": counted, "leader": leader, "world": [pace.world.node, pace.world.num_nodes]}
    (Path(folder) / f"{NODE}-{LOCAL}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
