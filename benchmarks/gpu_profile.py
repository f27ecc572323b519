"""Where a step on a GPU spends its time, beside a plain PyTorch loop: kernels, and what the host waits for.

    python benchmarks/gpu_profile.py mlp alexnet resnet50v2 language:bf16

Of each model: milliseconds of a step, of the host until it has given all work to the GPU, and of the GPU at work; the
kernels and calls of CUDA that take the longest; and of paceline the Python functions.
"""

from __future__ import annotations

import copy
import cProfile
import io
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import gpu

STEPS, PROFILED, SHOWN = 10, 3, 9
DEVICE = torch.device("cuda")


def times(step: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of a step, and of the host alone."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    host_s = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / STEPS, 1e3 * host_s / STEPS


def show(title: str, step: Callable[[], Any]) -> None:
    whole, host = times(step)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    rows = seen.key_averages()
    kernels = [row for row in rows if row.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda row: -row.self_device_time_total)
    busy = sum(row.self_device_time_total for row in kernels) / PROFILED / 1e3
    print(f"{title}: {whole:.3f} ms, host {host:.3f} ms, GPU at work {busy:.3f} ms", flush=True)
    calls = sorted((row for row in rows if row.key.startswith("cuda")), key=lambda row: -row.self_cpu_time_total)
    listed = [(row.self_device_time_total, row) for row in kernels[:SHOWN]]
    for took, row in [*listed, *((row.self_cpu_time_total, row) for row in calls[:4])]:
        print(f"    {took / PROFILED / 1e3:8.3f} ms {row.count / PROFILED:7.1f} times {row.key[:90]}", flush=True)


def functions(step: Callable[[], Any]) -> str:
    seen = cProfile.Profile()
    seen.enable()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    seen.disable()
    text = io.StringIO()
    pstats.Stats(seen, stream=text).sort_stats("tottime").print_stats(20)
    return "\n".join(text.getvalue().splitlines()[6:30])


def main() -> None:
    for job in sys.argv[1:]:
        name, _, precision = job.partition(":")
        model, batch = gpu.job(name)
        batch = tuple(part.to(DEVICE) for part in batch)
        first, other = model.to(DEVICE), copy.deepcopy(model).to(DEVICE)
        show(f"{job}, plain", gpu.plain(first, batch, precision or "fp32"))
        pace, step = gpu.ours(other, batch, precision or "fp32")
        show(f"{job}, paceline", step)
        print(functions(step), flush=True)
        pace.close()


if __name__ == "__main__":
    main()
