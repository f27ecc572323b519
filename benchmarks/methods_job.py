"""The job of `methods.py`: methods_job.py [EXCHANGE [CODEC [STEPS]]]; says its seconds and bytes per step."""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline_bench.cluster.namespaces import sent_bytes

BATCH, WARM = 64, 4

exchange, codec, steps = (*sys.argv[1:], *("allreduce", "none", "20")[len(sys.argv) - 1 :])
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
    *(nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10)),
)
count = BATCH * (WARM + int(steps))
data = torch.utils.data.TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,)))
loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
with paceline.join(
    model, optimizer, F.cross_entropy, batch_size=BATCH, exchange=exchange, codec=codec, shares="equal"
) as pace:
    start_s = start_bytes = done = 0.0
    for step, batch in enumerate(pace.batches(loader)):
        if step == WARM:
            start_s, start_bytes = time.perf_counter(), sent_bytes()
        pace.step(batch)
        if step >= WARM:
            done, took_s, sent = step - WARM + 1, time.perf_counter() - start_s, sent_bytes() - start_bytes
    if pace.leader and done:
        print("methods", json.dumps({"steps": done, "step_s": took_s / done, "sent_bytes": sent / done}), flush=True)
