"""Your own model, optimizer and loop. The same script runs in one process, in several, or on several machines:

python examples/own_loop.py
paceline run examples/own_loop.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(4096, 64)
targets = (inputs[:, :32].sum(1) > inputs[:, 32:].sum(1)).long()
dataset = TensorDataset(inputs, targets)

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with paceline.join(model, optimizer, nn.functional.cross_entropy, batch_size=256) as pace:
    for batch in pace.batches(dataset, epochs=3):
        loss = pace.step(batch)
        if batch.ends_epoch:
            right = pace.evaluate(dataset, lambda output, target: (output.argmax(1) == target).sum())
            if pace.leader:
                print(f"epoch {batch.epoch + 1}: loss {loss:.4f}, accuracy {right:.1%}")
