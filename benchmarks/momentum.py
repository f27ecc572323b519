"""One process: plain PyTorch with SGD against paceline, whose momentum takes fully-connected layers as factors.

    python benchmarks/momentum.py [--model alexnet] [--batch 32] [--threads 1] [--steps 20] [--json FILE]

Steps are interleaved in one process (A B A B ...) on the same batches and from the same weights; the peak
memory of each is that of a process of its own, beyond what it had before the model. Losses are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.registry import find

VARIANTS = ("torch", "paceline")
Step = Callable[[torch.Tensor, torch.Tensor], float]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = find("models", name, 3)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the losses of both are compared
    return model


def stepper(variant: str, arguments: argparse.Namespace) -> Step:
    model = build(arguments.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=arguments.decay)
    if variant == "paceline":
        pace = paceline.join(
            model, optimizer, F.cross_entropy, batch_size=arguments.batch, engine=f"threads:{arguments.threads}"
        )
        return lambda x, y: pace.step((x, y))

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def batch(arguments: argparse.Namespace, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(arguments.batch, *arguments.shape, generator=dice)
    return x, torch.randint(0, 3, (arguments.batch,), generator=dice)


def most(reset: bool = False) -> int:
    """The most memory this process has had, in bytes, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def peak(variant: str, arguments: argparse.Namespace) -> int:
    before = most(reset=True)
    step = stepper(variant, arguments)
    for seed in range(3):
        step(*batch(arguments, seed))
    return most() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--shape", type=int, nargs=3, default=(3, 224, 224))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--decay", type=float, default=0.0)
    parser.add_argument("--json")
    parser.add_argument("--peak", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print(peak(arguments.peak, arguments))
        return
    steps = {variant: stepper(variant, arguments) for variant in VARIANTS}
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    gap = 0.0
    for number in range(arguments.steps + 2):
        data, losses = batch(arguments, number), []
        for variant in VARIANTS:
            start = time.perf_counter()
            losses.append(steps[variant](*data))
            if number >= 2:
                seconds[variant].append(time.perf_counter() - start)
        gap = max(gap, abs(losses[0] - losses[1]) / abs(losses[0]))
    said: dict[str, object] = {"arguments": vars(arguments), "largest relative gap of losses": gap, "seconds": seconds}
    medians = {variant: statistics.median(seconds[variant]) for variant in VARIANTS}
    memory = {}
    for variant in VARIANTS:
        again = [sys.executable, *sys.argv, "--peak", variant]
        memory[variant] = int(subprocess.run(again, capture_output=True, text=True, check=True).stdout)
        rate = arguments.batch / medians[variant]
        print(f"{variant:10} {medians[variant]:.4f} s/step  {rate:8.1f} images/s  {memory[variant] / 1e6:8.1f} MB peak")
    said["peak bytes"] = memory
    ratios = [one / other for one, other in zip(seconds["torch"], seconds["paceline"], strict=True)]
    lower = sorted(ratios)[len(ratios) // 10]
    print(f"paceline is {statistics.median(ratios):.2f}x as fast (nine in ten pairs at least {lower:.2f}x), with")
    print(f"{memory['paceline'] / memory['torch']:.2f}x the memory; losses differ by at most {gap:.1e}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
