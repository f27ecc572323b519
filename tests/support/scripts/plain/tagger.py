"""Tags of words, by an LSTM over padded sentences."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
words = torch.randint(1, 30, (80, 9))
tags = words % 5
lengths = torch.randint(3, 10, (80, 1))
padded = torch.arange(9) >= lengths
words[padded], tags[padded] = 0, -100
loader = DataLoader(TensorDataset(words, tags), batch_size=16)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, words):
        return self.head(self.lstm(self.embed(words))[0]).flatten(0, 1)


model = Tagger()
criterion = nn.CrossEntropyLoss(ignore_index=-100)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
losses = []
for _ in range(3):
    for words, tags in loader:
        loss = criterion(model(words), tags.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
print(sum(losses) / len(losses))

torch.save(model.state_dict(), f"{sys.argv[1]}.{os.getpid()}")
