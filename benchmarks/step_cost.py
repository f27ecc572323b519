"""What a step costs more than it did: this checkout against another one, in interleaved blocks of steps.

    python benchmarks/step_cost.py --before CHECKOUT [--nodes 1,2] [--models mlp,alexnet,transformer,language]
                                   [--rounds 300] [--rate 1gbit]

Each version is a process of its own that trains alone, or one pair of processes, pinned to a core each, over loopback
or, with `--rate`, in network namespaces behind cables of that rate (as root). The versions take turns of a few steps,
and the order within a round alternates. The cost is the median of the differences within a round, which what else the
machine does seldom reaches; its error is the bootstrap's. The speed is the median of the ratios within a round, with
the bootstrap's 90 % interval of that median.

What checks cost grows with the number of layers and parameters, and not with their sizes. So `thin`, the transformer's
layers at a hundredth of its arithmetic, shows the same milliseconds with less noise.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster import Cluster

STEPS = {"mlp": 100, "thin": 5, "transformer": 2, "alexnet": 2, "language": 2}  # of a block
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
    if name == "language":
        try:
            from paceline_bench.cluster import work
        except ModuleNotFoundError:  # a version from before it was a distribution of its own
            from paceline.bench.cluster import work

        tokens = torch.randint(0, work.VOCABULARY, (8, work.CONTEXT + 1))
        return (
            work.LANGUAGE["transformer"](),
            F.cross_entropy,
            (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        )
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

    def __init__(self, home: Path, name: str, nodes: int, cluster: Cluster | None):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        # the benchmarks' own modules are this checkout's only where they are the version's
        paths = [str(path) for path in (home / "src", home / "bench" / "src") if path.is_dir()]
        version = {"PYTHONPATH": os.pathsep.join(paths), "PACELINE_SECRET": "cost" * 8, "MASTER_PORT": port}
        version["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the installed version's entry point is not for another one
        command = [sys.executable, __file__, "--work", name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = []
        for n in range(nodes):
            if cluster:
                self.processes.append(cluster.start(n, command, version, **pipes))
                continue
            own = {"RANK": str(n), "GROUP_RANK": str(n), "WORLD_SIZE": str(nodes), "MASTER_ADDR": "127.0.0.1"}
            own |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            self.processes.append(subprocess.Popen(command, env={**os.environ, **version, **own}, **pipes))

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
            process.communicate(timeout=30)  # its stdin ends, and so does it


def measure(before: Path, name: str, nodes: int, rounds: int, cluster: Cluster | None = None) -> None:
    homes = {"before": before, "now": HOME}
    versions = {each: Version(home, name, nodes, cluster) for each, home in homes.items()}
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
    fast = [a / b for a, b in zip(took["before"], took["now"], strict=True)]
    medians = sorted(statistics.median(rng.choices(fast, k=rounds)) for _ in range(RESAMPLES))
    low, high = medians[RESAMPLES // 20], medians[-1 - RESAMPLES // 20]
    speed = f"{statistics.median(fast):.3f} (90 %: {low:.3f} to {high:.3f})"
    print(f"| {name} | {nodes} | {then:.3f} | {now:.3f} | {cost} | {part} | {speed} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path)
    parser.add_argument("--models", default="mlp,transformer,alexnet")
    parser.add_argument("--nodes", default="1,2")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--rate", help="of each node's cable, in tc's words: 1gbit; default: loopback")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(given.work)
    if not given.before or not (given.before / "src/paceline").is_dir():
        parser.error(f"--before is another checkout, which holds src/paceline; got {given.before}")
    from cluster import Cluster  # not in a version's process, which may be of another one

    print("| model | nodes | before, ms/step | now, ms/step | more, ms | more | now is faster by |")
    print("|---|---|---|---|---|---|---|")
    for name in given.models.split(","):
        for nodes in map(int, given.nodes.split(",")):
            with Cluster(nodes, given.rate) if given.rate else contextlib.nullcontext() as cluster:
                measure(given.before.resolve(), name, nodes, given.rounds, cluster)
    return None


if __name__ == "__main__":
    main()
