"""Trains a small convolutional network to classify clothes, on the image sample that comes with paceline.

python examples/images.py
paceline run examples/images.py
"""

import torch
from torch import nn

import paceline
from paceline.data import sample

torch.manual_seed(0)
train, test = sample.load()  # 28 x 28 grey images; any torch Dataset works

model = nn.Sequential(
    *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(16 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, len(train.classes))),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def num_right(output, target):
    return (output.argmax(1) == target).sum()


# batch_size is the global batch: two processes compute half of it each, and the result is the same
with paceline.join(model, optimizer, nn.functional.cross_entropy, batch_size=128) as pace:
    for batch in pace.batches(train, epochs=2):
        loss = pace.step(batch)  # forward, backward, all-reduce, optimizer step
        if batch.ends_epoch:
            accuracy = pace.evaluate(test, num_right)  # every process must call it, because all take part
            if pace.leader:  # true in one process of the run
                print(f"epoch {batch.epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.1%}")
