"""Residual networks on 1, 2 and 4 nodes of a real Slurm, which are all this machine, started by `paceline sbatch`.

    python benchmarks/on_slurm.py --pin [options of on_slurm_job.py]

As root; slurmctld, slurmd and munge are installed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slurm import Slurm, unavailable

SCRIPT = Path(__file__).resolve().with_name("on_slurm_job.py")
FOUND = re.compile(r": ([\d.]+) images/s, accuracy ([\d.]+)%")


def done(*words: object, cwd: str, environment: dict[str, str]) -> str:
    ours = "SLURM_", "PACELINE_"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [str(word) for word in words]
    ran = subprocess.run(
        command, env={**clean, **environment}, cwd=cwd, capture_output=True, text=True, timeout=3600, check=False
    )
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50v2,resnet152v2")
    parser.add_argument("--nodes", default="1,2,4")
    asked, job = parser.parse_known_args()
    if why := unavailable():
        raise SystemExit(why)
    print("| model | nodes | images/s | speedup | accuracy | seconds of the job |\n|---|---|---|---|---|---|")
    with Slurm(max(map(int, asked.nodes.split(",")))) as cluster, tempfile.TemporaryDirectory() as folder:
        there = {"cwd": folder, "environment": {**cluster.environment, "MASTER_ADDR": "127.0.0.1"}}
        for model in asked.models.split(","):
            alone = 0.0
            for count in asked.nodes.split(","):
                name = f"{model}-{count}"
                words = "--plan", "sequential", "--out", name, "--write", f"{name}.sbatch"
                script = SCRIPT, "-N", count, "--model", model, *job
                done(sys.executable, "-m", "paceline", "sbatch", *words, *script, **there)
                begin_s = time.monotonic()
                done("sbatch", "--wait", f"{name}.sbatch", **there)
                seconds = time.monotonic() - begin_s
                (output,) = Path(folder, name).glob("slurm-*.out")
                found = FOUND.search(output.read_text())
                if not found:
                    raise SystemExit(output.read_text())
                rate, accuracy = map(float, found.groups())
                alone = alone or rate
                print(
                    f"| {model} | {count} | {rate:.1f} | {rate / alone:.2f} | {accuracy:.1f} % | {seconds:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
