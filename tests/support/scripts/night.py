"""A small run over night: goes on from what is kept, saves now and then, says each step: night.py FOLDER [SLOW]."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline

ROWS, COUNT, EPOCHS, EVERY = 8, 64, 4, 5


class Pictures(torch.utils.data.Dataset):
    def __init__(self, folder, slow):
        self.x = torch.randn(COUNT, 16, generator=torch.Generator().manual_seed(1))
        self.folder, self.slow, self.fetched = folder, slow, 0

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        self.fetched += 1
        if self.slow and self.fetched > self.slow * ROWS:
            (self.folder / f"slow.{os.getpid()}").touch()
            time.sleep(60)
        return self.x[i] + 0.1 * torch.rand(16), i % 3


def train(folder, slow=0, pause_s=0.0, engine=None, epochs=EPOCHS, every=EVERY):
    folder.mkdir(exist_ok=True)
    (folder / f"pid.{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 128), nn.Linear(128, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.2, total_steps=epochs * COUNT // ROWS, cycle_momentum=False
    )
    with paceline.join(
        model,
        optimizer,
        F.cross_entropy,
        batch_size=ROWS,
        scheduler=scheduler,
        folder=folder / "run",
        engine=engine,
    ) as pace:
        print("gone on" if pace.restore() else "begun", flush=True)
        for batch in pace.batches(Pictures(folder, slow), epochs):
            try:
                loss = pace.step(batch)
            finally:  # a signal ends the run in the step that was its last
                if pace.leader and pace.agreement.vote.weight:
                    vote = pace.agreement.vote
                    with (folder / "steps.txt").open("a") as file:
                        file.write(f"{pace.num_steps} {vote.loss_sum / vote.weight!r}\n")
            assert loss == loss
            if pace.num_steps % every == 0:
                pace.save(wait=False)
            time.sleep(pause_s)
        if pace.leader:
            torch.save(model.state_dict(), folder / "weights.pt")
            (folder / "shm.txt").write_text("\n".join(os.listdir("/dev/shm")))


if __name__ == "__main__":
    train(Path(sys.argv[1]), int((*sys.argv[2:], "0")[0]), pause_s=0.03)
