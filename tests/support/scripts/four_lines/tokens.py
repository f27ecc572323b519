"""The next token of a sequence, by a small transformer, with a schedule by steps."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
tokens = torch.randint(0, 20, (64, 17))
loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 20)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.block(self.embed(tokens), mask)).transpose(1, 2)


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
pace = paceline.join(model, optimizer, F.cross_entropy, batch_size=8)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
for epoch in range(2):
    total = 0.0
    for batch in pace.batches(loader):
        loss = pace.step(batch)
        schedule.step()
        total += loss.item()
    print(f"{epoch}: {total / len(loader):.4f}")

torch.save(model.state_dict(), f"{sys.argv[1]}.{os.getpid()}")
