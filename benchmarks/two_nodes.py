"""Two nodes on a slow link: PyTorch's DDP, no exchange at all, and paceline, interleaved in one run.

    python benchmarks/two_nodes.py [--rate 1gbit] [--steps 20] [--loss-steps 20] [--json FILE]

Every step of one variant is followed by one of the next (A B C A B C ...), started together by a
barrier. A step's time is that of the slower node. Bytes are the network card's. A second part, with
dropout off and new images each step, compares the loss curves of DDP and paceline.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from cluster import Cluster, sent_bytes
from paceline.train.models import alexnet

VARIANTS = ("ddp", "none", "paceline")


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def build(dropout: bool) -> nn.Module:
    torch.manual_seed(0)
    model = alexnet.build(3)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    return model


def images(batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 224, 224, generator=dice), torch.randint(0, 3, (batch,), generator=dice)


def node(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    said: dict[str, object] = {}
    for dropout, part in ((True, timing), (False, losses)):
        models = {name: build(dropout) for name in VARIANTS}
        wrapped = DistributedDataParallel(models["ddp"])
        optimizers = {name: sgd(model) for name, model in models.items()}
        pace = paceline.join(
            models["paceline"],
            optimizers["paceline"],
            nn.functional.cross_entropy,
            batch_size=world * arguments.batch,
            engine="sequential",
        )

        def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        steps = {
            "ddp": lambda x, y: plain(wrapped, optimizers["ddp"], x, y),  # noqa: B023
            "none": lambda x, y: plain(models["none"], optimizers["none"], x, y),  # noqa: B023
            "paceline": lambda x, y: pace.step((x, y)),  # noqa: B023
        }
        said.update(part(arguments, rank, world, steps))
        pace.close()
    print("RESULT " + json.dumps(said), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def timing(arguments: argparse.Namespace, rank: int, world: int, steps: dict) -> dict:
    x, y = images(arguments.batch, 1 + rank)
    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    sent: dict[str, list[int]] = {name: [] for name in VARIANTS}
    for turn in range(arguments.warm_up + arguments.steps):
        for name in VARIANTS:
            dist.barrier()
            before, start = sent_bytes(), time.perf_counter()
            steps[name](x, y)
            mine = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            after = sent_bytes()
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            if turn >= arguments.warm_up:
                taken[name].append(float(mine))
                sent[name].append(after - before)
    return {"seconds": taken, "sent": sent}


def losses(arguments: argparse.Namespace, rank: int, world: int, steps: dict) -> dict:
    curves: dict[str, list[float]] = {"ddp": [], "paceline": []}
    for turn in range(arguments.loss_steps):
        x, y = images(arguments.batch, 1000 + turn * world + rank)
        mine = torch.tensor([steps["ddp"](x, y)], dtype=torch.float64)
        dist.all_reduce(mine)
        curves["ddp"].append(float(mine) / world)
        curves["paceline"].append(steps["paceline"](x, y))
    return {"losses": curves}


def drive(arguments: argparse.Namespace) -> None:
    with Cluster(2, arguments.rate) as cluster:
        command = [sys.executable, __file__, "--node", *sys.argv[1:]]
        nodes = [cluster.start(n, command, stdout=subprocess.PIPE, text=True) for n in range(2)]
        outputs = [process.communicate(timeout=3600)[0] for process in nodes]
    if any(process.returncode for process in nodes):
        sys.exit(f"a node failed: {[process.returncode for process in nodes]}")
    results = [json.loads(output.split("RESULT ", 1)[1]) for output in outputs]
    seconds = results[0]["seconds"]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"AlexNet, 3 classes, {arguments.batch} images per node, fp32, {arguments.rate}, {arguments.steps} steps each\n"
    )
    print("| variant | s/step, median | quartiles | images/s | against DDP | sent per node and step, MB |")
    print("|---|---|---|---|---|---|")
    for name in VARIANTS:
        low, _, high = statistics.quantiles(seconds[name], n=4)
        megabytes = max(statistics.median(result["sent"][name]) for result in results) / 1e6
        print(
            f"| {name} | {medians[name]:.3f} | {low:.3f} to {high:.3f} | {2 * arguments.batch / medians[name]:.1f} "
            f"| {medians['ddp'] / medians[name]:.2f}x | {megabytes:.2f} |"
        )
    ratios = sorted(a / c for a, c in zip(seconds["ddp"], seconds["paceline"], strict=True))
    print(f"\npaired DDP / paceline: median {statistics.median(ratios):.2f}x, {ratios[0]:.2f}x to {ratios[-1]:.2f}x")
    curves = results[0]["losses"]
    gap = max(abs(a - b) / abs(a) for a, b in zip(curves["ddp"], curves["paceline"], strict=True))
    print(f"loss over {arguments.loss_steps} steps, dropout off: largest relative difference {gap:.1e}")
    print(
        f"first and last: DDP {curves['ddp'][0]:.6f} {curves['ddp'][-1]:.6f}, paceline "
        f"{curves['paceline'][0]:.6f} {curves['paceline'][-1]:.6f}"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"nodes": results, "arguments": vars(arguments)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rate", default="1gbit", help="of each cable, in tc's words")
    parser.add_argument("--batch", type=int, default=32, help="images per node")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each variant")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--loss-steps", type=int, default=20)
    parser.add_argument("--json", default="", help="write all raw figures here")
    chosen = parser.parse_args()
    node(chosen) if chosen.node else drive(chosen)
