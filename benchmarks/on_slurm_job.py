"""Trains ResNet50V2 or ResNet152V2 on 32x32 colour images, and prints throughput and accuracy.

    python benchmarks/on_slurm_job.py
    paceline sbatch -N 2 benchmarks/on_slurm_job.py --model resnet152v2

`--pin`: each node on a core of its own, where all nodes are one machine.
"""

import argparse
import os
import time

import torch
from torch import nn

import paceline
from paceline.data import sample
from paceline.registry import find

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet50v2", choices=["resnet50v2", "resnet101v2", "resnet152v2"])
parser.add_argument("--images", type=int, default=960, help="of each epoch")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32, help="of all nodes together")
parser.add_argument("--pin", action="store_true")
arguments = parser.parse_args()
if arguments.pin:
    os.sched_setaffinity(0, {int(os.environ["SLURM_NODEID"]) % (os.cpu_count() or 1)})


def coloured(part, count):
    """The sample's grey images in 32 x 32, each in a colour of its own, which says nothing of its class."""
    images, labels = part.fetch(range(count), 0)
    tint = torch.rand(count, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(nn.functional.pad(images, (2, 2, 2, 2)) * (0.5 + tint), labels)


train, test = sample.load()
classes, train, test = len(train.classes), coloured(train, arguments.images), coloured(test, 1500)
torch.manual_seed(0)
model = find("models", arguments.model, classes)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

with paceline.join(model, optimizer, nn.functional.cross_entropy, batch_size=arguments.batch_size) as pace:
    for batch in pace.batches(train, arguments.epochs):
        if pace.num_steps == 5:  # those before warm up
            begin_s = time.perf_counter()
        loss = pace.step(batch)
    seconds, steps = time.perf_counter() - begin_s, pace.num_steps - 5
    accuracy = pace.evaluate(test, lambda output, target: (output.argmax(1) == target).sum())
    if pace.leader:
        rate = arguments.batch_size * steps / seconds
        print(
            f"{arguments.model}, {pace.world.num_nodes} nodes: {rate:.1f} images/s, accuracy {accuracy:.1%}", flush=True
        )
