"""What a checkpoint costs the training: waited for, and written beside it, against the same steps without one.

    python benchmarks/saving.py [--model alexnet] [--batch 32] [--engine threads:2] [--every 20] [--rounds 5]
        [--folder DIR] [--json FILE]

One process. Blocks of ``every`` steps take turns: without a save, with one that is waited for, with one beside the
training; each save comes first in its block, and the block's seconds count all of it. What a save costs is the median
over the rounds of what its block took longer than the block without; a save that is still being written at the
end of its block is waited for outside of it, and said. ``--folder`` names the disk that is written to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from paceline.checkpoint.checkpoint import newest
from paceline.registry import find
from paceline.report import record

WAYS = ("without", "waited for", "beside")
ALLOWED = 0.02  # of the steps between two saves


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    torch.manual_seed(0)
    model = find("models", arguments.model, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    dice = torch.Generator().manual_seed(0)
    batch = (
        torch.randn(arguments.batch, *arguments.shape, generator=dice),
        torch.randint(0, 3, (arguments.batch,), generator=dice),
    )
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    num_late, steps_beside = 0, set[int]()
    with paceline.join(
        model, optimizer, F.cross_entropy, batch_size=arguments.batch, engine=arguments.engine, folder=folder
    ) as pace:
        for i in range(-1, arguments.rounds):  # the first round takes memory, and warms up
            for way in WAYS[i % 3 :] + WAYS[: i % 3]:
                begin = time.perf_counter()
                if way == "beside" and i >= 0:
                    steps_beside.add(pace.num_steps)
                path = pace.save(wait=way == "waited for") if way != "without" else None
                for _ in range(arguments.every):
                    pace.step(batch)
                took = time.perf_counter() - begin
                num_late += path is not None and newest(folder) != path
                while path is not None and newest(folder) != path:
                    time.sleep(0.01)
                if i >= 0:
                    seconds[way].append(took)
    events = [event for event in record.read(folder) if event["event"] == "checkpoint"]
    beside = [event for event in events if event["step"] in steps_beside]
    found = {"step_s": statistics.median(seconds["without"]) / arguments.every, "late": float(num_late)}
    for way, name in (("waited for", "waited_s"), ("beside", "beside_s")):
        pairs = zip(seconds[way], seconds["without"], strict=True)
        found[name] = statistics.median(one - other for one, other in pairs)
    found["held_s"] = statistics.median(event["seconds"] for event in beside)
    found["write_s"] = statistics.median(event["write_seconds"] for event in beside)
    files = newest(folder)
    found["bytes"] = float(sum(file.stat().st_size for file in files.iterdir())) if files else 0.0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--shape", type=int, nargs="+", default=(3, 224, 224))
    parser.add_argument("--engine", default="threads:2")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", dir=arguments.folder) as folder:
        found = measure(arguments, Path(folder))
    print(f"{arguments.model}, batch {arguments.batch}, {arguments.engine}: {found['step_s']:.3f} s per step")
    print(f"a checkpoint of {found['bytes'] / 1e6:.0f} MB costs the training")
    print(f"  waited for   {found['waited_s']:7.3f} s")
    print(f"  beside it    {found['beside_s']:7.3f} s, of which {found['held_s']:.3f} s before the next step")
    print(f"               {found['write_s']:7.3f} s until it is on the disk")
    if found["late"]:
        print(f"  {found['late']:.0f} were not there at the end of their block; give --every more steps")
    least = max(1, round(found["beside_s"] / ALLOWED / found["step_s"]))
    print(f"  beside it at most {ALLOWED:.0%} of the time with one every {least} steps or more")
    if arguments.json:
        arguments.json.write_text(json.dumps({**vars(arguments), **found}, default=str, indent=1) + "\n")


if __name__ == "__main__":
    main()
