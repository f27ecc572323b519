"""Two nodes whose codec owes something: a run, and the same gone on with from its middle: owed.py FOLDER."""

import json
import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from nodes import build, rows
from paceline.messages import Bucket

STEPS, MIDDLE, BATCH = 6, 3, 24


def spec(count):
    return Bucket(0, ("weight",), ((count,),))


def join(codec="feedback/topk:keep=0.1"):
    model = build(dtype=torch.float32)
    return paceline.join(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        F.cross_entropy,
        batch_size=BATCH,
        exchange="allreduce:forms=dense",
        codec=codec,
        shares="equal",
        engine=os.environ.get("PACELINE_ENGINE") or "sequential",
    )


def memory(pace):
    """Of this node's codec; an empty one where another process has it."""
    exchange = getattr(pace.exchange, "exchange", pace.exchange)
    return [pair[0] for pair in exchange.memory.values()] if hasattr(exchange, "memory") else []


def data():
    return TensorDataset(*rows(STEPS * BATCH, 1, torch.float32))


def train(folder, restore=False):
    """Weights and what is owed, at the end."""
    with join() as pace:
        if restore:
            assert pace.restore(folder)
            assert pace.num_steps == MIDDLE
        for batch in pace.batches(data()):
            pace.step(batch)
            if pace.num_steps == MIDDLE and not restore:
                pace.save(folder, wait=False)
        return [weight.clone() for weight in pace.engine.weights], memory(pace), pace.world


def main(folder):
    weights, left, world = train(folder / "run")
    again, left_again, _ = train(folder / "run", restore=True)
    faults = [f"weight {i}" for i, pair in enumerate(zip(weights, again, strict=True)) if not torch.equal(*pair)]
    faults += [f"memory {i}" for i, pair in enumerate(zip(left, left_again, strict=True)) if not torch.equal(*pair)]
    if world.local_rank == 0:
        said = {"faults": faults, "owed": float(sum(residual.abs().sum() for residual in left))}
        (folder / f"{world.node}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
