"""Node 1 is slow until it has given rows away, and all ends when it has got some back.

shares.py FOLDER LOOP..., where a LOOP is step, own, or empty.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import OPTIMIZERS, Plain, build, rows

BATCH, COUNT, EPOCHS = 24, 24 * 5 + 7, 25
NODE, PLACE = int(os.environ.get("GROUP_RANK", "0")), os.environ.get("RANK", "0")


class Samples:
    """The label is the sample's number."""

    def __init__(self):
        self.x = rows(COUNT, 3)[0]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], i


def entropy(output, target):
    return F.cross_entropy(output, target % 3)


def several(output, target):
    return {"entropy": entropy(output, target), "size": 0.1 * output.square().mean()}


def follow(folder, loop):
    model, mine, shares = build(Plain), [], []

    def loss(output, target):
        mine[-1] += target.tolist()
        slow = 4 if NODE and (len(mine) < 2 or shares[-1][1] == BATCH // 2) else 1
        time.sleep(0.004 * slow * len(target))
        return entropy(output, target)

    with paceline.join(
        model, OPTIMIZERS["sgd"](model.parameters()), loss, batch_size=BATCH, seed=3, folder=folder / loop
    ) as pace:
        losses = []
        for batch in pace.batches(Samples(), epochs=EPOCHS, workers=1):
            mine.append([])
            if loop == "own":
                share = pace.rows(batch)
                if share is not None:
                    pace.backward(loss(model(share[0]), share[1]))
                losses.append(pace.update())
            else:
                losses.append(pace.step(batch))
            shares.append(pace.shares)
            if shares[-1][1] > min(slow for _, slow in shares):
                break  # it has got some back
        pace.save()
        kept = pace.shares
        right = pace.evaluate(Samples(), lambda output, target: target.sum())
        state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(state, folder / f"{loop}-{PLACE}.pt")
    with paceline.join(model, OPTIMIZERS["sgd"](model.parameters()), loss, batch_size=BATCH, seed=3) as pace:
        begun = pace.shares
        pace.restore(folder / loop)
        again = pace.shares
    said = {"losses": losses, "mine": mine, "shares": shares, "kept": [kept, begun, again], "right": right}
    (folder / f"{loop}-{PLACE}.json").write_text(json.dumps(said))


def empty(folder):
    """Node 1 has no rows, and does not know the names of the loss's parts."""
    model = build(Plain)
    with paceline.join(model, OPTIMIZERS["sgd"](model.parameters()), several, batch_size=BATCH, shares=(1, 0)) as pace:
        losses = [pace.step(batch) for batch in pace.batches(Samples(), shuffle=False)]
    (folder / f"empty-{PLACE}.json").write_text(json.dumps({"losses": losses, "terms": pace.terms}))


def main(folder, *loops):
    for loop in loops:
        if loop == "empty":
            empty(Path(folder))
        else:
            follow(Path(folder), loop)


if __name__ == "__main__":
    main(*sys.argv[1:])
