"""Trains 40 steps, then waits for FOLDER/enough, and writes FOLDER/RANK: meeting.py FOLDER [group]."""

import contextlib
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from nodes import build, rows

folder = Path(sys.argv[1])
if "group" in sys.argv:
    torch.distributed.init_process_group("gloo")
secret = os.environ.get("PACELINE_SECRET", "")
for path in Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):  # that process has ended
        assert not (secret and secret.encode() in path.read_bytes()), "the secret is on a command line"
torch.set_num_threads(1)
model = build(dtype=torch.float32)
pace = paceline.join(
    model, torch.optim.SGD(model.parameters(), lr=1e-2), F.cross_entropy, batch_size=24, engine="sequential"
)
rank, size = pace.world.node, pace.world.num_nodes
for step in range(40):
    pace.step(rows(24 // size, 2 * step + rank, torch.float32))
weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
while pace.control.all_reduce([float((folder / "enough").exists())])[0] < size:
    time.sleep(0.01)
(folder / str(rank)).write_text(f"{weights} {secret or '-'}")
pace.close()
if "group" in sys.argv:
    torch.distributed.destroy_process_group()
