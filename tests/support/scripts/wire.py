"""Bytes of a step, three times over: declared by the exchange, counted by the link, counted by the card."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline
from cluster import sent_bytes
from paceline.exchange.flow.cost_model import dense_cost, factor_cost
from paceline.messages import FACTORS

STEPS, ROWS = 20, 16
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 3))
pace = paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, batch_size=2 * ROWS)
batch = torch.randn(ROWS, 1024), torch.randint(0, 3, (ROWS,))
pace.step(batch)
lane = pace.exchange._lane
pace.control.all_reduce([0.0])
before, link_before = sent_bytes(), lane.sent_bytes
for _ in range(STEPS):
    pace.step(batch)
pace.control.all_reduce([0.0])
said = {
    "declared": sum(
        (factor_cost(bucket, ROWS, 2) if form == FACTORS else dense_cost(bucket, 2)).bytes
        for bucket, form in zip(pace.engine.buckets, pace.exchange.forms(), strict=True)
    ),
    "counted_by_link": (lane.sent_bytes - link_before) / STEPS,
    "counted_by_card": (sent_bytes() - before) / STEPS,
    "dense": sum(dense_cost(bucket, 2).bytes for bucket in pace.engine.buckets),
}
Path(sys.argv[1], f"{pace.world.node}.json").write_text(json.dumps(said))
pace.close()
