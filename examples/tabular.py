"""Predicts prices from a table with numbers and categories; batches are dicts, the learning rate has a schedule.

python examples/tabular.py
paceline run examples/tabular.py
"""

import torch
from torch import nn

import paceline

ROWS, EPOCHS, BATCH = 4096, 4, 128
dice = torch.Generator().manual_seed(0)
numbers = torch.randn(ROWS, 6, generator=dice)
towns = torch.randint(0, 10, (ROWS,), generator=dice)
noise = 0.1 * torch.randn(ROWS, generator=dice)
prices = numbers[:, 0] - numbers[:, 1] * numbers[:, 2] + towns / 5 + noise


class Table(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        i = self.rows[i]
        return {"numbers": numbers[i], "town": towns[i], "price": prices[i]}


class Appraiser(nn.Module):
    """Gets the batch's columns as keyword arguments; ``price`` is one of them, and is not used."""

    def __init__(self):
        super().__init__()
        self.town = nn.Embedding(10, 4)
        self.layers = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, numbers, town, price=None):
        return self.layers(torch.cat([numbers, self.town(town)], dim=1))[:, 0]


def loss(output, batch):
    return nn.functional.mse_loss(output, batch["price"])


def errors(output, batch):
    """Sums over samples, by name: `evaluate` returns their means."""
    off = (output - batch["price"]).abs()
    return {"mean error": off.sum(), "within 0.5": (off < 0.5).sum()}


torch.manual_seed(0)
model = Appraiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
train, test = Table(range(ROWS - 512)), Table(range(ROWS - 512, ROWS))
steps = EPOCHS * -(-len(train) // BATCH)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)  # paceline steps it once per step

with paceline.join(model, optimizer, loss, batch_size=BATCH, scheduler=scheduler) as pace:
    for batch in pace.batches(train, EPOCHS):
        value = pace.step(batch)
        if batch.ends_epoch:
            means = pace.evaluate(test, errors)
            if pace.leader:
                said = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
                print(f"epoch {batch.epoch + 1}: loss {value:.3f}, {said}")
