"""A new head on layers that do not train."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
for parameter in trunk.parameters():
    parameter.requires_grad = False
model = nn.Sequential(trunk, nn.Linear(24, 3))
data = TensorDataset(torch.randn(100, 10), torch.randint(0, 3, (100,)))
loader = DataLoader(data, batch_size=20)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, nesterov=True, momentum=0.9, weight_decay=1e-3)
best = float("inf")
for epoch in range(3):
    for batch in loader:
        inputs, labels = batch
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
    if loss < best:
        best = loss.detach()
    print(epoch, best)

torch.save(model.state_dict(), f"{sys.argv[1]}.{os.getpid()}")
