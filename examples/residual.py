"""Trains a residual network with batch normalisation; it can be stopped at any time, and resumes from there.

python examples/residual.py --out runs/residual
paceline run examples/residual.py --out runs/residual --bf16
"""

import argparse

import torch
from torch import nn

import paceline
from paceline.data import sample

parser = argparse.ArgumentParser()
parser.add_argument("--out", help="the run's folder; by default nothing is saved")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16: faster if the processor supports it")
arguments = parser.parse_args()


class Block(nn.Module):
    """Two convolutions and a shortcut; with a stride, both shrink the image."""

    def __init__(self, before, after, stride=1):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)),
        )
        nn.init.zeros_(self.body[-1].weight)  # each block starts as its shortcut alone
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else nn.Identity()

    def forward(self, x):
        return nn.functional.relu(self.body(x) + self.short(x))


torch.manual_seed(0)
train, test = sample.load()
train = torch.utils.data.Subset(torch.utils.data.TensorDataset(*train.fetch(range(len(train)), 0)), range(0, 6000, 5))
model = nn.Sequential(
    *(nn.Conv2d(1, 8, 3, 2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    *(Block(8, 8), Block(8, 16, 2), Block(16, 32, 2)),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3)),
)
# no weight decay for biases and normalisation
plain = [p for p in model.parameters() if p.dim() < 2]
decayed = [p for p in model.parameters() if p.dim() >= 2]
optimizer = torch.optim.SGD(
    [{"params": decayed, "weight_decay": 1e-4}, {"params": plain}], lr=0.1, momentum=0.9, nesterov=True
)

with paceline.join(
    model,
    optimizer,
    nn.CrossEntropyLoss(label_smoothing=0.05),
    batch_size=64,
    batch_norm="sync",  # statistics of the global batch, for any number of processes
    precision="bf16" if arguments.bf16 else None,
    folder=arguments.out,  # with a folder, Ctrl-C ends the step, saves, and exits
) as pace:
    if arguments.out and pace.restore() and pace.leader:
        print(f"going on after step {pace.num_steps}")
    for batch in pace.batches(train, arguments.epochs):
        loss = pace.step(batch)
        if batch.ends_epoch:
            accuracy = pace.evaluate(test, lambda output, target: (output.argmax(1) == target).sum())
            if pace.leader:
                print(f"epoch {batch.epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.1%}")
            if arguments.out:
                pace.save()
    if arguments.out:
        pace.export(f"{arguments.out}/weights.safetensors")
