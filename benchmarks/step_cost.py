"""What a step costs more than it did: this checkout against another one, in interleaved blocks of steps.

    python benchmarks/step_cost.py --before CHECKOUT [--nodes 1,2] [--models mlp,alexnet,transformer] [--rounds 300]

Each version is a process of its own that trains alone, or one pair of processes over loopback, pinned to a core each.
The versions take turns of a few steps, and the order within a round alternates. The cost is the median of the
differences within a round, which what else the machine does seldom reaches; its error is the bootstrap's.

What checks cost grows with the number of layers and parameters, and not with their sizes. So `thin`, the transformer's
layers at a hundredth of its arithmetic, shows the same milliseconds with less noise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = {"mlp": 100, "thin": 5, "transformer": 2, "alexnet": 1}  # of a block
RESAMPLES = 400
HOME = Path(__file__).resolve().parent.parent


def job(name: str) -> tuple[Any, Callable[..., Any], Any]:
    """(model, loss, this process's samples)."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    if name == "mlp":
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        return model, F.cross_entropy, (torch.randn(16, 32), torch.randint(0, 4, (16,)))
    if name == "alexnet":
        try:
            from paceline.registry import find
        except ModuleNotFoundError:  # a version from before it had that name
            from paceline.find import find

        return find("models", "alexnet", 3), F.cross_entropy, (torch.randn(32, 3, 224, 224), torch.randint(0, 3, (32,)))
    rows, length, width = (2, 4, 16) if name == "thin" else (8, 32, 64)
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), nn.Flatten(), nn.Linear(length * width, 4)
    )
    return model, F.cross_entropy, (torch.randn(rows, length, width), torch.randint(0, 4, (rows,)))


def work(name: str) -> None:
    """Answers each line of stdin with the seconds per step of a block."""
    import torch

    import paceline

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("RANK", "0")) % len(cores)]})
    model, loss, samples = job(name)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    pace = paceline.join(model, optimizer, loss, batch_size=len(samples[0]) * size, engine="sequential", shares="equal")
    for line in sys.stdin:
        begin = time.perf_counter()
        for _ in range(int(line)):
            pace.step(samples)
        print(json.dumps((time.perf_counter() - begin) / int(line)), flush=True)
    pace.close()


class Version:
    """One checkout's processes."""

    def __init__(self, home: Path, name: str, nodes: int):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        base = {**os.environ, "PYTHONPATH": str(home / "src"), "WORLD_SIZE": str(nodes), "MASTER_ADDR": "127.0.0.1"}
        base |= {"MASTER_PORT": str(port), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PACELINE_SECRET": "cost" * 8}
        command = [sys.executable, __file__, "--work", name]
        pipe = subprocess.PIPE
        self.processes = [
            subprocess.Popen(
                command, env={**base, "RANK": str(n), "GROUP_RANK": str(n)}, stdin=pipe, stdout=pipe, text=True
            )
            for n in range(nodes if nodes > 1 else 1)
        ]

    def block(self, steps: int) -> float:
        for process in self.processes:
            assert process.stdin
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return max(
            float(json.loads(process.stdout.readline() or "NaN")) for process in self.processes if process.stdout
        )

    def close(self) -> None:
        for process in self.processes:
            if process.stdin:
                process.stdin.close()
            process.wait(30)


def measure(before: Path, name: str, nodes: int, rounds: int) -> None:
    versions = {"before": Version(before, name, nodes), "now": Version(HOME, name, nodes)}
    try:
        steps = STEPS[name]
        for version in versions.values():
            version.block(max(2, steps // 2))
        took: dict[str, list[float]] = {each: [] for each in versions}
        for i in range(rounds):
            for each in sorted(versions, reverse=bool(i % 2)):
                took[each].append(versions[each].block(steps))
    finally:
        for version in versions.values():
            version.close()
    then, now = (1e3 * statistics.median(took[each]) for each in ("before", "now"))
    more, rng = [1e3 * (b - a) for a, b in zip(took["before"], took["now"], strict=True)], random.Random(0)
    cost = statistics.median(more)
    half = 2 * statistics.stdev(statistics.median(rng.choices(more, k=rounds)) for _ in range(RESAMPLES))
    cost, part = f"{cost:+.4f} (± {half:.4f})", f"{100 * cost / then:+.2f} % (± {100 * half / then:.2f})"
    print(f"| {name} | {nodes} | {then:.3f} | {now:.3f} | {cost} | {part} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path)
    parser.add_argument("--models", default="mlp,transformer,alexnet")
    parser.add_argument("--nodes", default="1,2")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(given.work)
    if not given.before or not (given.before / "src/paceline").is_dir():
        parser.error(f"--before is another checkout, which holds src/paceline; got {given.before}")
    print("| model | nodes | before, ms/step | now, ms/step | more, ms | more |\n|---|---|---|---|---|---|")
    for name in given.models.split(","):
        for nodes in map(int, given.nodes.split(",")):
            measure(given.before.resolve(), name, nodes, given.rounds)
    return None


if __name__ == "__main__":
    main()
