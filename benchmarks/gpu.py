"""Steps on a GPU beside a plain PyTorch loop, in turns: the same model, batch, optimizer and precision.

    python benchmarks/gpu.py [--device cuda] [--models alexnet,resnet50v2,language,mlp] [--rounds 15]

A round times a block of steps of each, with the GPU idle before and after it; the order alternates. A line gives the
median seconds of a step of both, and the median ratio of a round (above 1: paceline is faster) with the least and the
largest. Samples lie on the device; no loss is read in either loop but at the end of a block. First the weights after
three steps in float64 are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.registry import find
from paceline_bench.cluster import work

STEPS = {"mlp": 100, "alexnet": 20, "resnet50v2": 5, "language": 10}  # of a block
PRECISIONS = ("fp32", "bf16", "fp16")


def job(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    if name == "mlp":
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        return model, (torch.randn(16, 32), torch.randint(0, 4, (16,)))
    if name == "language":
        tokens = torch.randint(0, work.VOCABULARY, (32, work.CONTEXT + 1))
        return work.LANGUAGE["transformer"](), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return find("models", name, 3), (torch.randn(128, 3, 224, 224), torch.randint(0, 3, (128,)))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)


def plain(model: nn.Module, batch: tuple[Tensor, Tensor], precision: str) -> Callable[[], Any]:
    stepper = optimizer(model)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(batch[0].device.type, enabled=precision == "fp16")

    def step() -> Any:
        stepper.zero_grad()
        with torch.autocast(batch[0].device.type, dtype) if dtype else contextlib.nullcontext():
            loss = F.cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(stepper)
        scaler.update()
        return loss.detach()

    return step


def ours(model: nn.Module, batch: tuple[Tensor, Tensor], precision: str) -> tuple[Any, Callable[[], Any]]:
    pace = paceline.join(
        model, optimizer(model), F.cross_entropy, batch_size=len(batch[0]), engine="sequential", precision=precision
    )
    return pace, lambda: pace.step(batch)


def block_s(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronise()
    begin = time.perf_counter()
    for _ in range(steps):
        loss = step()
    float(loss)
    synchronise()
    return (time.perf_counter() - begin) / steps


def difference(name: str, device: torch.device) -> float:
    """Of all weights after three steps in float64, relative to how far they moved."""
    model, batch = job(name)
    batch = tuple((part.double() if part.is_floating_point() else part).to(device)[:8] for part in batch)
    model = model.to(device, torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    first, other = copy.deepcopy(model), copy.deepcopy(model)
    pace, step = ours(other, batch, "fp32")
    for each in (plain(first, batch, "fp32"), step):
        for _ in range(3):
            each()
    pace.close()
    began, one, two = (nn.utils.parameters_to_vector(each.parameters()).detach() for each in (model, first, other))
    return float((one - two).norm() / (one - began).norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default=",".join(STEPS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=0, help="of a block; 0: as many as suit the model")
    options = parser.parse_args()
    device = torch.device(options.device)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}", flush=True)
    for name in options.models.split(","):
        print(f"{name}: weights differ by {difference(name, device):.1e} of how far they moved", flush=True)
        for precision in options.precisions.split(","):
            model, batch = job(name)
            batch = tuple(part.to(device) for part in batch)
            first, other = model.to(device), copy.deepcopy(model).to(device)
            pace, step = ours(other, batch, precision)
            both, steps = (plain(first, batch, precision), step), options.steps or STEPS[name]
            for each in both:
                block_s(each, max(3, steps // 3), device)
            rounds: list[tuple[float, ...]] = []
            for i in range(options.rounds):
                found = {k: block_s(both[k], steps, device) for k in ((0, 1), (1, 0))[i % 2]}
                rounds.append((found[0], found[1]))
            pace.close()
            ratios = sorted(one / two for one, two in rounds)
            middle = [1e3 * statistics.median(times) for times in zip(*rounds, strict=True)]
            print(
                f"  {precision}: plain {middle[0]:.3f} ms, paceline {middle[1]:.3f} ms; "
                f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) times as fast",
                flush=True,
            )


if __name__ == "__main__":
    main()
