"""How soon training continues once a node returns to survivors that wait: benchmarks/returning.py [--record FOLDER]

    --model alexnet --batch 4      of each node
    --rate 1gbit --returns 3       as many trainings, in each of which one of two nodes is killed and started again
    --victim 0                     which of the two: 0 leads at first, so the other one leads when it returns

Nodes are network namespaces, as root. Below the minimum of two nodes, the survivor waits with everything in memory.
What counts is the time from the returning node's first join request until it has the next step's batch, against 1 s
and its state (weights and optimizer) at DEMANDED of the link.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import paceline
from joining import Noise, steps, wait
from paceline.elastic import joiner
from paceline.registry import find
from paceline.report.record import NAME
from paceline_bench.cluster.namespaces import Cluster, bits_per_s, unavailable

STEPS, DEMANDED, GRACE_S = 4, 0.8, 1.0


def train(name: str, batch: int, result: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    times: dict[str, float] = {}
    ask = joiner.JoiningLink._send

    def asks(self: joiner.JoiningLink, *given: Any) -> Any:
        times.setdefault("asked", time.monotonic())
        return ask(self, *given)

    joiner.JoiningLink._send = asks  # type: ignore[method-assign]
    model = find("models", name, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    options = {"batch_size": 2 * batch, "engine": "sequential+channels_last", "shares": "equal"}
    with paceline.join(model, optimizer, F.cross_entropy, **options) as pace:
        for data in pace.batches(Noise(), epochs=1000):
            times.setdefault("ready", time.monotonic())
            pace.step(data)
            times.setdefault("stepped", time.monotonic())
            if "asked" in times and not result.exists():
                result.write_text(json.dumps(times))


def one(model: str, batch: int, rate: str, victim: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, Cluster(2, rate) as cluster:
        survivor, result = 1 - victim, Path(folder) / "times.json"
        common = {"PACELINE_SECRET": secrets.token_hex(32), "PACELINE_NODES": "2:2", "PACELINE_WAIT": "600"}
        command = [sys.executable, __file__, "--train", str(result), "--model", model, "--batch", str(batch)]

        def start(node: int, more: dict[str, str]) -> Any:
            own = {"RANK": str(node), "WORLD_SIZE": "2", "GROUP_RANK": str(node), "PACELINE_HOST": f"host{node}"}
            own |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            # one folder each: the record is written by the node that leads
            keeps = {"PACELINE_FOLDER": f"{folder}/{node}", "PACELINE_TICKET_FILE": f"{folder}/ticket.json"}
            return cluster.start(node, command, {**common, **own, **keeps, **more})

        nodes = [start(node, {}) for node in range(2)]
        wait(Path(folder) / "0" / NAME, lambda found: len(steps(found)) >= STEPS, nodes)
        nodes[victim].kill()
        nodes[victim].wait()
        record, left = Path(folder) / str(survivor) / NAME, [nodes[survivor]]
        wait(record, lambda found: any(event["event"] == "wait" for event in found), left)
        back = start(victim, {"PACELINE_JOIN_TICKET": f"{folder}/ticket.json", "PACELINE_NODE": str(victim)})
        found = wait(
            record, lambda found: result.exists() and any(e["event"] == "waited" for e in found), [*left, back]
        )
        times = json.loads(result.read_text())
    (came,) = [event for event in found if event["event"] == "welcome"]
    num_bytes, took_s = came["num_bytes"] + came["ahead_bytes"], times["ready"] - times["asked"]
    return {
        "state_mb": num_bytes / 1e6,
        "request_to_step_s": took_s,
        "limit_s": GRACE_S + 8 * num_bytes / (DEMANDED * bits_per_s(rate)),
        "of_the_link": 8 * num_bytes / bits_per_s(rate) / took_s,
        "meeting_s": came["seconds"],
        "first_step_s": times["stepped"] - times["ready"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How soon training continues once a node returns.")
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--returns", type=int, default=3)
    parser.add_argument("--victim", type=int, choices=(0, 1), default=1)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--train", type=Path, help="one node of it")
    asked = parser.parse_args()
    if asked.train:
        return train(asked.model, asked.batch, asked.train)
    if why := unavailable():
        raise SystemExit(f"nodes are network namespaces on this machine: {why}")
    results = [one(asked.model, asked.batch, asked.rate, asked.victim) for _ in range(asked.returns)]
    names = list(results[0])
    table = [f"| | {' | '.join(f'return {i + 1}' for i in range(len(results)))} |", "|---" * (len(results) + 1) + "|"]
    table += [f"| {name} | {' | '.join(f'{each[name]:.3g}' for each in results)} |" for name in names]
    print("\n".join(table))
    late_ones = [each for each in results if each["request_to_step_s"] > each["limit_s"]]
    print(
        f"\n{len(results) - len(late_ones)} of {len(results)} within {GRACE_S:g} s and state at {DEMANDED:.0%} of it."
    )
    if asked.record:
        asked.record.mkdir(parents=True, exist_ok=True)
        (asked.record / "returning.json").write_text(json.dumps(results, indent=1) + "\n")
        (asked.record / "returning.md").write_text("\n".join(table) + "\n")
    raise SystemExit(bool(late_ones))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
