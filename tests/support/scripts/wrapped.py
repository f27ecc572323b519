"""Models in wrappers of torch's own, trained one after the other on two nodes: wrapped.py FOLDER KIND...

Rank 0 keeps what each has become; KIND "plain" is without a wrapper.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

import cases
import paceline

folder = Path(sys.argv[1])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)


def wrapped(kind, plain):
    if kind == "deep":
        plain.second = DistributedDataParallel(plain.second, static_graph=True)
        return plain
    if kind == "twofold":
        return DistributedDataParallel(DataParallel(plain), find_unused_parameters=True)
    return plain if kind == "plain" else DistributedDataParallel(plain)


for kind in sys.argv[2:]:
    torch.manual_seed(7)
    model = wrapped(kind, cases.Net().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    like = {"dtype": torch.float64, "device": next(model.parameters()).device}  # DataParallel may take a GPU
    if kind == "armed":  # a first look at the model: the next backward pass would all-reduce
        model(torch.ones(2 + rank, cases.IN, **like))
    forward = (lambda _, batch, model=model: model(batch[0])) if kind == "called" else None
    words = {"engine": "sequential", "exchange": "allreduce:factors", "shares": (3, 1), "forward": forward}
    with paceline.join(model, optimizer, F.cross_entropy, batch_size=16, **words) as pace:
        for batch in pace.batches(cases.Rows(16 * cases.STEPS, lambda x, y: (x, y)), shuffle=False):
            pace.step(batch)
            with torch.no_grad():
                model(torch.zeros(1 + rank, cases.IN, **like))
        assert "factors" in pace.exchange.forms()
        pace.save(folder / kind)
        pace.export(folder / f"{kind}.safetensors")
    if isinstance(model, DistributedDataParallel):  # it is the user's own again
        model.zero_grad()
        model(torch.full((1, cases.IN), float(rank), **like)).sum().backward()
        both = [torch.zeros(1, **like) for _ in range(size)]
        dist.all_gather(both, next(iter(model.parameters())).grad.sum().reshape(1))
        assert both[0] == both[1] != 0
dist.destroy_process_group()
