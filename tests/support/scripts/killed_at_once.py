"""All nodes kill themselves after some step, once: killed_at_once.py FOLDER STEP [restore]. Saves after step 3."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import paceline

FOLDER, LAST = Path(sys.argv[1]), int(sys.argv[2])
NODE, NODES = os.environ["GROUP_RANK"], int(os.environ["WORLD_SIZE"])
DEADLINE_S = 30.0


def die():
    """When all have come so far, so that nobody hears of another's end."""
    (FOLDER / f"dies.{NODE}").touch()
    end = time.monotonic() + DEADLINE_S
    while len(list(FOLDER.glob("dies.*"))) < NODES and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.arange(40) % 3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
fresh = not (FOLDER / f"dies.{NODE}").exists()
with paceline.join(model, optimizer, torch.nn.functional.cross_entropy, batch_size=8) as pace:
    if "restore" in sys.argv:
        pace.restore()
    for batch in pace.batches(data, epochs=2):
        pace.step(batch)
        if pace.num_steps == 3 and pace.folder:
            pace.save()
        if pace.num_steps == LAST and fresh:
            die()
torch.save(model.state_dict(), FOLDER / f"{NODE}.pt")
