"""One contender: a model on one batch of random images, stepping when asked to.

    python -m paceline_bench.single.contender WAY MODEL BATCH

WAY: "torch" (the loop by hand, torch's own threads), "torch:k" (k threads), "ddp" (two processes started with
RANK and WORLD_SIZE), "paceline" (the engine that PACELINE_ENGINE names); "+channels_last" after torch or ddp.
Every way trains the same model on the same rows with the same optimizer, and knows nothing of the others. At the
socket that PACELINE_BENCH names, `paceline_bench/single/paired.py` asks it for a number of steps, or by 0 for the end.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline_bench.cluster import work

CLASSES = 3


def mlp(num_classes: int) -> nn.Module:
    """Three small layers: a step so short that whatever surrounds it shows."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes))


def made(name: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    if name == "mlp":
        torch.manual_seed(0)
        return mlp(CLASSES), torch.randn(batch, 64), torch.arange(batch) % CLASSES
    job = work.Work(name, batch)
    return job.network(), job.x, job.y


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


def ours(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Callable[[], float], int]:
    import paceline

    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    pace = paceline.join(model, optimizer, cross_entropy, batch_size=len(x))
    rank, size = pace.world.local_rank, pace.world.local_size
    mine = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
    return lambda: pace.step((x[mine], y[mine])), size


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


def main(way: str, name: str, batch: str) -> None:
    kind, _, words = way.partition("+")
    model, x, y = made(name, int(batch))
    if "channels_last" in words and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    size = 1
    if kind == "ddp":
        step, size = ddp(model, x, y), int(os.environ["WORLD_SIZE"])
    elif kind == "paceline":
        step, size = ours(model, x, y)
    else:
        _, _, threads = kind.partition(":")
        if threads:
            torch.set_num_threads(int(threads))
        step = by_hand(model, x, y)
    serve(step, size)


def serve(step: Callable[[], float], size: int) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["PACELINE_BENCH"])
        talk, loss = line.makefile("rw"), 0.0

        def say(**said: Any) -> None:
            talk.write(json.dumps(said) + "\n")
            talk.flush()

        say(size=size)
        for words in talk:
            seconds = []
            for _ in range(int(words)):
                start = time.perf_counter()
                loss = step()
                seconds.append(time.perf_counter() - start)
            if not seconds:
                say(loss=loss, peak_bytes=peak_bytes(), pss_bytes=memory_bytes())
                break
            say(step_s=statistics.median(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
