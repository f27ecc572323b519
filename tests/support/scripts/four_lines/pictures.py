"""Images, a convolutional net, gradients clipped."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = TensorDataset(torch.rand(96, 3, 12, 12), torch.randint(0, 4, (96,)))
loader = DataLoader(data, batch_size=16)
model = nn.Sequential(
    *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(8, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)),
)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model.train()
pace = paceline.join(model, optimizer, criterion, batch_size=16, clip=0.5)
for epoch in range(2):
    for batch in pace.batches(loader):
        loss = pace.step(batch)
    print(epoch, float(loss))

torch.save(model.state_dict(), f"{sys.argv[1]}.{os.getpid()}")
