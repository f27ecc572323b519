"""Each exchange and codec on two nodes over ssh, as `paceline plan` predicts it and as it is.

    python benchmarks/methods.py [--rate 100mbit] [--rounds 2] [--only server,ordered] [--out FOLDER]

Nodes are network namespaces of one core each (needs root). The plan is made once; then each method trains in turn, in
each round once. Whoever communicates once in several steps trains for some of its periods.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline_bench.chaos.hosts import Machines

HERE = Path(__file__).parent
JOB = str(HERE / "methods_job.py")
STEPS, PERIODIC = 20, {"diloco": 200, "local_sgd": 40}
LIMIT_S = 600


def paceline(machines: Machines, command: str, *words: str) -> str:
    hosts = ["-H", "node0,node1", "--ssh", machines.ssh]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", command, *hosts, *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=HERE,
    )
    if done.returncode:
        raise SystemExit(f"paceline {command} {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


def measured(machines: Machines, one: dict[str, Any]) -> dict[str, float]:
    steps = str(PERIODIC.get(one["exchange"], STEPS))
    said = paceline(machines, "run", "--plan", "sequential", JOB, one["exchange"], one["codec"], steps)
    line = next((line for line in said.splitlines() if "methods {" in line), "")
    if not line:
        raise SystemExit(f"{one['exchange']} {one['codec']} said nothing of its steps: {said}")
    found: dict[str, float] = json.loads(line[line.index("{") :])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="exchanges")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with Machines(2, given.rate, path=[HERE]) as machines:
        plan = json.loads(paceline(machines, "plan", "--rows", "sequential", "--json", JOB))
        shared = next(team for team in plan["teams"] if team["nodes"] == 2 and team["batch"] == "shared")
        wanted = [name for name in given.only.split(",") if name]
        rows = [one for one in plan["methods"] if one["predicted_s"] and (one["exchange"] in wanted or not wanted)]
        print(f"two nodes: {shared['predicted_s']:.3f} s predicted, {shared['measured_s']:.3f} s measured by the plan")
        if {one["batch_size"] for one in rows} != {shared["batch_size"]}:
            raise SystemExit("the plan's methods are of the team with a larger batch, the faster one; run again")
        taken: list[list[dict[str, float]]] = [[] for _ in rows]
        for _ in range(given.rounds):
            for i, one in enumerate(rows):
                taken[i].append(measured(machines, one))
                print(one["exchange"], one["codec"], one["predicted_s"], taken[i][-1], flush=True)
    lines = [
        "| exchange | codec | predicted s | measured s (least, most) | error | predicted MB | measured MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, times in zip(rows, taken, strict=True):
        step_s = [each["step_s"] for each in times]
        middle, sent = statistics.median(step_s), statistics.median(each["sent_bytes"] for each in times)
        lines.append(
            f"| {one['exchange']} | {one['codec']} | {one['predicted_s']:.3f} | {middle:.3f} ({min(step_s):.3f}, "
            f"{max(step_s):.3f}) | {one['predicted_s'] / middle - 1:+.0%} | {one['sent_bytes'] / 1e6:.2f} | "
            f"{sent / 1e6:.2f} |"
        )
    print("\n".join(lines))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "table.md").write_text("\n".join(lines) + "\n")
        (given.out / "plan.json").write_text(json.dumps(plan, indent=1))


if __name__ == "__main__":
    main()
