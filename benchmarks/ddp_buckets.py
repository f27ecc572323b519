"""A step under DistributedDataParallel, part by part: torch's class, its bucket sizes, ours, and no exchange at all.

    python benchmarks/ddp_buckets.py MODEL ROWS [--rate 1gbit | --one-machine] [--classes none,torch,torch:2,ours,fused]
                                     [--steps 20]
    python benchmarks/ddp_buckets.py --sums 1,25,94 [--rate 1gbit --ranks 4]

Two ranks, a core each: nodes in network namespaces with links of that rate (as root), or on one machine. Classes take
turns in the same processes, in random order; "torch:2" has buckets of 2 MB. A line has the medians of forward,
backward, update and step, in seconds. `--sums`: how long ranks take to add up so many MiB in shared memory and by gloo,
and to gather those of all, in milliseconds: two of one machine, or half of `--ranks` on each of two nodes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from cluster import Cluster
from paceline.launch.local import free_port

WARM_UP, TIMEOUT_S = 12, 550  # ours tries two forms of its sums in ten steps
Parts = tuple[float, float, float, float]


def wrapped(name: str, model: Any) -> Any:
    from torch.nn.parallel.distributed import DistributedDataParallel as Theirs

    from paceline.ddp.module import DistributedDataParallel as Ours

    kind, _, size = name.partition(":")
    if kind == "none":
        return model
    if kind == "torch":
        return Theirs(model, bucket_cap_mb=float(size)) if size else Theirs(model)
    os.environ["PACELINE_DDP_OPTIMIZER"] = "fused" if kind == "fused" else ""
    try:
        return Ours(model)
    finally:
        del os.environ["PACELINE_DDP_OPTIMIZER"]


def stepper(name: str, job: Any) -> Callable[[], Parts]:
    from torch.nn import functional as F

    model = wrapped(name, job.model())
    optimizer = job.sgd(model)

    def step() -> Parts:
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(job.x), job.y)
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        backward = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        return forward - begin, backward - forward, end - backward, end - begin

    return step


def steps(options: argparse.Namespace, dist: Any) -> None:
    from paceline_bench.cluster.work import Work

    job = Work(options.model, options.rows, dist.get_rank(), 2)
    steppers = {name: stepper(name, job) for name in options.classes.split(",")}
    took: dict[str, list[Parts]] = {name: [] for name in steppers}
    for i in range(options.steps):
        order = list(steppers)
        random.Random(i).shuffle(order)
        for name in order:
            dist.barrier()
            parts = steppers[name]()
            took[name] += [parts] if i >= WARM_UP else []
    for name, each in took.items() if not dist.get_rank() else ():
        print(f"{name:10}", *(f"{statistics.median(column):.3f}" for column in zip(*each, strict=True)), flush=True)


def sums(options: argparse.Namespace, dist: Any) -> None:
    import torch

    from paceline.ddp.sums import hierarchical

    store = dist.PrefixStore("sums", dist.distributed_c10d._get_default_store())
    nodes = [rank * 2 // options.ranks if options.rate else 0 for rank in range(options.ranks)]
    shared = hierarchical.made(store, dist.get_rank(), nodes, timedelta(seconds=60))
    assert shared
    for size in map(int, options.sums.split(",")):
        own = torch.zeros(size << 18)
        parts = [torch.empty_like(own) for _ in range(options.ranks)]
        for what, ours, theirs in (
            ("sum", shared.add, dist.all_reduce),
            ("gather", shared.gather, lambda own, parts=parts: dist.all_gather(parts, own)),
        ):
            found = []
            for run in (ours, theirs):
                took = []
                for _ in range(WARM_UP + 12):
                    dist.barrier()
                    begin = time.perf_counter()
                    run(own)
                    took.append(time.perf_counter() - begin)
                found.append(1e3 * statistics.median(took[WARM_UP:]))
            if not dist.get_rank():
                print(f"{what} of {size} MiB: {found[0]:.2f} ms in shared memory, {found[1]:.2f} by gloo", flush=True)


def rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed

    dist: Any = torch.distributed  # its stubs leave out what we use
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (sums if options.sums else steps)(options, dist)
    dist.barrier()
    dist.destroy_process_group()


def _place(node: int, local_rank: int, size: int) -> dict[str, str]:
    local = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(size)}
    return {"RANK": str(node * size + local_rank), "WORLD_SIZE": str(2 * size), **local}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="vit")
    parser.add_argument("rows", nargs="?", type=int, default=8)
    parser.add_argument("--rate")
    parser.add_argument("--one-machine", action="store_true")
    parser.add_argument("--classes", default="none,torch,torch:2,ours")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sums", default="")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options)
        return
    command = [sys.executable, *sys.argv]
    if not (options.one_machine or (options.sums and not options.rate)):
        each = options.ranks // 2
        with Cluster(2, options.rate) as cluster:
            started = [cluster.start(node, command, _place(node, i, each)) for node in range(2) for i in range(each)]
            ended = [process.wait(TIMEOUT_S) for process in started]
        sys.exit(max(ended))
    cores, port = sorted(os.sched_getaffinity(0)), str(free_port())
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    given |= {"OMP_NUM_THREADS": "1"}
    started = []
    for place in range(2):
        words = ["taskset", "-c", str(cores[place % len(cores)]), *command]
        own = {**os.environ, **given, "RANK": str(place), "LOCAL_RANK": str(place)}
        started.append(subprocess.Popen(words, env=own))
    sys.exit(max(process.wait(TIMEOUT_S) for process in started))


if __name__ == "__main__":
    main()
