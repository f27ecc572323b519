"""Trains several cases one after the other, joining anew for each: many.py FOLDER CASE...

A case is MODEL,OPTIMIZER,CLIP,EXCHANGE,CODEC[,MORE]; with "!" after the exchange the last process refuses two steps.
MORE is a number of micro-batches; "bf16", which computes in float32 and rounds; or "few": batches of FEW rows, the
last one of a single row.
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import paceline
from nodes import MODELS, OPTIMIZERS, Wide, build, rows
from paceline.messages import Decision

STEPS, BATCH = 5, 21  # 21 rows: no two processes have equally many
FEW, NUM_FEW = 5, 21


def data(dtype):
    parts = [rows(BATCH, seed, dtype) for seed in range(STEPS)]
    return TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))


def refuse(pace, steps):
    """This process votes against these steps, once each, if it is the last; returns the steps that were redone."""
    world, collect, commit = pace.world, pace.exchange.collect, pace.control.commit
    last = (world.node, world.local_rank) == (world.num_nodes - 1, world.local_size - 1)
    waiting, redone = set(steps) if last else set(), []

    def refused(vote):
        vote.ok = pace.num_steps not in waiting
        waiting.discard(pace.num_steps)
        return collect(vote)

    def heard(vote, finish):
        outcome = commit(vote, finish)
        if outcome.decision is Decision.RETRY:
            redone.append(pace.num_steps)
        return outcome

    pace.exchange.collect, pace.control.commit = refused, heard
    return redone


def main(folder, *cases):
    for case in cases:
        kind, optimizer, clip, exchange, codec, *more = case.split(",")
        dtype = torch.float32 if more == ["bf16"] else torch.float64
        model, samples = build(MODELS.get(kind, Wide), dtype), data(dtype)
        few = more == ["few"]
        if few:
            samples, more = Subset(samples, range(NUM_FEW)), []
        stepper = OPTIMIZERS[optimizer](model.parameters())
        with paceline.join(
            model,
            stepper,
            F.cross_entropy,
            batch_size=FEW if few else BATCH,
            clip=float(clip) or None,
            exchange=exchange.rstrip("!"),
            codec=codec,
            folder=Path(folder) / "runs" / case,
            **({"precision": "bf16"} if more == ["bf16"] else {"accumulate": int(*more)} if more else {}),
        ) as pace:
            redone = refuse(pace, (1, 3)) if exchange.endswith("!") else []
            losses = [pace.step(batch) for batch in pace.batches(samples, shuffle=False)]
            right = pace.evaluate(samples, lambda output, target: (output.argmax(1) == target).sum())
            pace.export(Path(folder) / f"{case}.safetensors")
            if pace.leader:
                said = {"losses": losses, "right": right, "forms": list(pace.exchange.forms()), "redone": redone}
                (Path(folder) / f"{case}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
