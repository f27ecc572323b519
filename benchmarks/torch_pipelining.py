"""A step of torch.distributed.pipelining's 1F1B schedule: two stages, each a process of one core, over gloo.

    python benchmarks/torch_pipelining.py [STEPS]

The models and batches of `pipeline.py`, which times ours; SGD with momentum. Prints the median of the steps after two.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn.functional import cross_entropy

from paceline.launch.local import free_port
from paceline_bench.single.contender import made

RUNS = (("alexnet", 32, "features.8", 4), ("transformer@128", 16, "blocks.3", 8))


def stage(rank: int, port: int, name: str, batch: int, cut: str, micros: int, steps: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model, x, y = made(name, batch)
    cut_model = pipeline(model, (x.chunk(micros)[0],), split_spec={cut: SplitPoint.BEGINNING})
    own = cut_model.build_stage(rank, torch.device("cpu"))
    optimizer = torch.optim.SGD(own.submod.parameters(), lr=1e-3, momentum=0.9)
    schedule, seconds = Schedule1F1B(own, micros, loss_fn=cross_entropy), []
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        schedule.step(*(() if rank else (x,)), **({"target": y} if rank else {}))
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        middle = statistics.median(seconds[2:])
        print(f"{name} b{batch}, {micros} micro-batches, cut before {cut}: {middle:.3f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    for run in RUNS:
        multiprocessing.spawn(stage, (free_port(), *run, int(sys.argv[1]) if sys.argv[1:] else 9), nprocs=2)
