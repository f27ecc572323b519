"""One contender, timed: a model on one batch of random images, for some steps, printed as JSON.

    python -m paceline.bench.contender WAY MODEL BATCH STEPS

WAY: "torch" (the loop by hand, torch's own threads), "torch:k" (k threads), "ddp" (two processes started with
RANK and WORLD_SIZE), "paceline" (the engine that PACELINE_ENGINE names); "+channels_last" after torch or ddp.
Every way trains the same model on the same rows with the same optimizer, and knows nothing of the others.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WARM_UP_STEPS = 3
CLASSES = 3


def mlp(num_classes: int) -> nn.Module:
    """Three small layers: a step so short that whatever surrounds it shows."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes))


def made(name: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if name == "mlp":
        model, shape = mlp(CLASSES), tuple[int, ...]((64,))
    else:
        from paceline.network import network

        net = network(name)
        model, shape = net.build(CLASSES), net.input or (3, 224, 224)
    return model, torch.randn(batch, *shape), torch.arange(batch) % CLASSES


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def step() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    return step


def ddp(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mine = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
    return by_hand(DistributedDataParallel(model), x[mine], y[mine])


def ours(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    import paceline

    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    pace = paceline.join(model, optimizer, cross_entropy, batch_size=len(x))
    rank, size = pace.world.local_rank, pace.world.local_size
    mine = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
    return lambda: pace.step((x[mine], y[mine]))


def memory_bytes() -> int:
    """Of this process, shared pages by its part of them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def main(way: str, name: str, batch: str, steps: str) -> None:
    kind, _, words = way.partition("+")
    model, x, y = made(name, int(batch))
    if "channels_last" in words and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    losses: list[float] = []
    if kind == "ddp":
        step = ddp(model, x, y)
    elif kind == "paceline":
        step = ours(model, x, y)
    else:
        _, _, threads = kind.partition(":")
        if threads:
            torch.set_num_threads(int(threads))
        step = by_hand(model, x, y)
    for _ in range(WARM_UP_STEPS):
        losses.append(step())
    seconds = []
    for _ in range(int(steps)):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    said: dict[str, Any] = {
        "step_s": statistics.median(seconds),
        "loss": losses[-1],
        "peak_bytes": peak_bytes(),
        "pss_bytes": memory_bytes(),
    }
    folder = Path(os.environ["PACELINE_BENCH"])
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
