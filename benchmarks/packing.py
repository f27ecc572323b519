"""One core: what packing a model's gradients and unpacking them takes, and what it leaves of their bytes.

    python benchmarks/packing.py [--model vgg16] [--batch 8] [--repeats 7]

Of the convolutions' gradients after three steps from scratch on noise; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn import functional as F

from paceline.codec.encoding.packing import pack, unpack
from paceline.registry import find

STEPS = 3


def gradients(name: str, batch: int) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = find("models", name, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = torch.randn(batch, 3, 224, 224), torch.randint(0, 3, (batch,))
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [(key, p.grad) for key, p in model.named_parameters() if p.dim() == 4 and p.grad is not None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    whole, left, seconds = 0, 0, [0.0, 0.0]
    print("| gradient | MB | zeros | left | pack, ns/B | unpack, ns/B |\n|---|---|---|---|---|---|")
    for key, gradient in gradients(given.model, given.batch):
        packs, unpacks = [], []
        for _ in range(given.repeats):
            begin = time.perf_counter()
            packed = pack(gradient)
            middle = time.perf_counter()
            back = unpack(packed, gradient.dtype)
            packs.append(middle - begin)
            unpacks.append(time.perf_counter() - middle)
            assert torch.equal(back, gradient.reshape(-1))
        took = statistics.median(packs), statistics.median(unpacks)
        whole, left = whole + gradient.nbytes, left + packed.numel()
        seconds = [total + each for total, each in zip(seconds, took, strict=True)]
        told = " | ".join(f"{1e9 * each / gradient.nbytes:.2f}" for each in took)
        zeros = float((gradient == 0).float().mean())
        print(
            f"| {key} | {gradient.nbytes / 1e6:.2f} | {zeros:.2f} | {packed.numel() / gradient.nbytes:.3f} | {told} |"
        )
    told = " | ".join(f"{1e9 * each / whole:.2f}" for each in seconds)
    print(f"| all | {whole / 1e6:.2f} | | {left / whole:.3f} | {told} |")


if __name__ == "__main__":
    main()
