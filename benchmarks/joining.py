"""How long those who train stand still while another node is taken in: python benchmarks/joining.py [--record FOLDER]

    --model alexnet --batch 16     of each node
    --rate 1gbit --joins 3         as many trainings, in each of which a fourth node comes to three
    --processes 2                  of each node

Nodes are network namespaces, as root. The fourth is started when three have trained for STEPS steps; what counts is the
longest pause between the ends of two steps from then on, less the median step before and after: what the meeting, the
rest of the state and everything else that is not a step has cost those who trained.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from paceline.link.net.ticket import JoinTicket
from paceline.registry import find
from paceline.report.record import NAME
from paceline_bench.cluster.namespaces import Cluster, unavailable

BEFORE, NODES, STEPS, LIMIT_S = 3, 4, 12, 400.0
POLL_S = 0.2


class Noise:
    """Images that nobody has to read."""

    def __init__(self, shape: tuple[int, ...] = (3, 224, 224), count: int = 4096):
        dice = torch.Generator().manual_seed(0)
        self.images, self.count = torch.randn(64, *shape, generator=dice), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.images[i % 64], i % 3


def train(name: str, batch: int, processes: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = find("models", name, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    engine = f"processes:{processes}" if processes > 1 else "sequential"
    options = {"batch_size": BEFORE * batch, "engine": f"{engine}+channels_last", "shares": "equal"}
    with paceline.join(model, optimizer, F.cross_entropy, **options) as pace:
        for data in pace.batches(Noise(), epochs=1000):
            pace.step(data)


def events(record: Path) -> list[dict]:
    lines = record.read_text().splitlines() if record.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait(record: Path, enough, processes) -> list[dict]:
    end = time.monotonic() + LIMIT_S
    while not enough(found := events(record)):
        if time.monotonic() > end or any(process.poll() is not None for process in processes):
            raise SystemExit(f"the training ended, or took longer than {LIMIT_S:.0f} s; see what it said above")
        time.sleep(POLL_S)
    return found


def steps(found: list[dict]) -> list[dict]:
    return [event for event in found if event["event"] == "step"]


def one(model: str, batch: int, rate: str, processes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, Cluster(NODES, rate) as cluster:
        ticket, record = Path(folder) / "ticket.json", Path(folder) / NAME
        common = {"PACELINE_SECRET": secrets.token_hex(32), "PACELINE_NODES": f"2:{NODES}", "PACELINE_FOLDER": ""}
        command = [sys.executable, __file__, "--train", "--model", model, "--batch", str(batch)]
        command += ["--processes", str(processes)]

        def start(node: int, first_rank: int, size: int, more: dict[str, str]) -> None:
            for local in range(processes):
                own = {"RANK": str(first_rank + local), "WORLD_SIZE": str(size), "GROUP_RANK": str(node)}
                own |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(processes)}
                nodes.append(cluster.start(node, command, {**common, **own, **more}))

        nodes: list = []
        for n in range(BEFORE):
            keeps = {"PACELINE_FOLDER": folder} if n == 0 else {}
            start(n, n * processes, BEFORE * processes, {"PACELINE_TICKET_FILE": str(ticket), **keeps})
        wait(record, lambda found: len(steps(found)) >= STEPS, nodes)
        told = JoinTicket.read(ticket)
        late = {"PACELINE_JOIN_TICKET": str(ticket), "PACELINE_SECRET": told.secret, "PACELINE_NODES": told.nodes}
        asked_s = time.time()
        start(BEFORE, 0, processes, late)

        def over(found: list[dict]) -> bool:
            came = [event for event in found if event["event"] == "welcome"]
            return bool(came) and len([s for s in steps(found) if s["step"] > came[0]["step"]]) >= STEPS

        found = wait(record, over, nodes)
    (came,) = [event for event in found if event["event"] == "welcome"]
    all_steps = steps(found)
    before = statistics.median(s["seconds"] for s in all_steps[2:] if s["time"] < asked_s)
    beside = statistics.median(s["seconds"] for s in all_steps if s["time"] > asked_s and s["step"] < came["step"])
    after = statistics.median(s["seconds"] for s in all_steps if s["step"] > came["step"] + 1)
    pauses = [(b["time"] - a["time"], b["step"]) for a, b in pairwise(all_steps) if b["time"] > asked_s]
    longest, where = max(pauses)
    joint = next(pause for pause, step in pauses if step == came["step"])
    return {
        "before_s": before,
        "beside_s": beside,
        "after_s": after,
        "longest_s": longest,
        "longest_after_steps": where - came["step"],
        "joint_s": joint,
        "meeting_s": came["seconds"],
        "steps_meanwhile": len([s for s in all_steps if s["time"] > asked_s and s["step"] < came["step"]]),
        "ahead_mb": came["ahead_bytes"] / 1e6,
        "then_mb": came["num_bytes"] / 1e6,
        "longest_steps": (longest - before) / before,
        "joint_steps": (joint - before) / before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a late node costs those who train.")
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--joins", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--train", action="store_true", help="one node of it")
    asked = parser.parse_args()
    if asked.train:
        return train(asked.model, asked.batch, asked.processes)
    if why := unavailable():
        raise SystemExit(f"nodes are network namespaces on this machine: {why}")
    results = [one(asked.model, asked.batch, asked.rate, asked.processes) for _ in range(asked.joins)]
    names = list(results[0])
    table = [
        f"| {' | '.join(['', *(f'join {i + 1}' for i in range(len(results)))])} |",
        "|---" * (len(results) + 1) + "|",
    ]
    table += [f"| {name} | {' | '.join(f'{each[name]:.3g}' for each in results)} |" for name in names]
    print("\n".join(table))
    worst = max(each["longest_steps"] for each in results)
    print(f"\nThe three stood still for {worst:.2f} steps at most at once, where 1 is demanded.")
    if asked.record:
        asked.record.mkdir(parents=True, exist_ok=True)
        (asked.record / "joining.json").write_text(json.dumps(results, indent=1) + "\n")
        (asked.record / "joining.md").write_text("\n".join(table) + "\n")
    return None


if __name__ == "__main__":
    main()
