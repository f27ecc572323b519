"""Hugging Face's Trainer and Lightning on one host, two processes: our DistributedDataParallel beside torch's.

    python benchmarks/libraries.py [--libraries trainer,lightning] [--models mlp,alexnet,...] [--rounds 5]

A round trains once with each class, in new processes of one thread, the order alternating; of a training, the median
seconds of a step after the first five. A line gives the medians over the rounds, and the median ratio of a round (above
1: ours is faster) with the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = {"mlp": 600, "alexnet": 25, "resnet50v2": 20, "vit": 30, "transformer": 30}
FIRST, TIMEOUT_S = 5, 300
JOB = Path(__file__).with_name("libraries_job.py")
CLASSES = {"ours": ((), "paceline.ddp.module"), "torch's": (("--ddp-off",), "torch.nn.parallel.distributed")}


def step_s(library: str, name: str, whose: str) -> float:
    options, expected = CLASSES[whose]
    plan = ("--plan", "processes:2") if library == "trainer" else ()  # Lightning starts its processes itself
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        command = [sys.executable, "-m", "paceline", "run", *options, *plan, str(JOB), library, name, str(STEPS[name])]
        path = os.pathsep.join(
            [str(JOB.parent), str(JOB.parents[1] / "bench" / "src"), os.environ.get("PYTHONPATH", "")]
        )
        done = subprocess.run(
            [*command, str(out)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode or not out.exists():
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found = json.loads(out.read_text())
    if found["class"] != expected:
        raise SystemExit(f"{library} trained with {found['class']}, asked for {expected}")
    return statistics.median(found["seconds"][FIRST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", default="trainer,lightning")
    parser.add_argument("--models", default=",".join(STEPS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for library in options.libraries.split(","):
        for name in options.models.split(","):
            rounds: list[tuple[float, float]] = []
            for i in range(options.rounds):
                order = ("ours", "torch's") if i % 2 else ("torch's", "ours")
                took = {whose: step_s(library, name, whose) for whose in order}
                rounds.append((took["torch's"], took["ours"]))
            ratios = sorted(theirs / ours for theirs, ours in rounds)
            theirs, ours = (1e3 * statistics.median(column) for column in zip(*rounds, strict=True))
            print(
                f"{library} {name}: torch's {theirs:.2f} ms, ours {ours:.2f} ms; "
                f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) times as fast",
                flush=True,
            )


if __name__ == "__main__":
    main()
