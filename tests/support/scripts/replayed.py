"""Replays line.json over a real link, and measures that link: replayed.py FOLDER STEPS. Rank 0 writes said.json."""

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import Plain
from paceline.planner.measure import network

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
model = Plain()
options = {"batch_size": 16, "engine": "emulated:line.json", "shares": "equal"}
options["exchange"] = "allreduce:packed=never"  # what is emulated packs unlike gradients
pace = paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, **options)
batch = torch.zeros(8, 1), torch.zeros(8)
wires = network.measure(pace.link)
taken = []
for _ in range(steps + 3):
    pace.control.all_reduce([0.0])
    before, start = pace.link.sent_bytes, time.perf_counter()
    forms = list(pace.exchange.forms())
    pace.step(batch)
    taken.append((time.perf_counter() - start, pace.link.sent_bytes - before))
if pace.leader:
    times, sent = zip(*taken[3:], strict=True)
    said = {"steps_s": times, "sent_bytes": sent[-1], "forms": forms, "wires": wires.to_dict()}
    (folder / "said.json").write_text(json.dumps(said))
pace.close()
