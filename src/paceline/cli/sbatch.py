"""`paceline sbatch`: writes a batch script for Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import prepare
from paceline.launch.batch_script import BatchJob, write
from paceline.registry import PROCESSES


def sbatch(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script with its own arguments, or -m and a module.")],
    nodes: Annotated[int, typer.Option("-N", "--nodes", help="How many.")] = 1,
    plan: Annotated[
        str, typer.Option(help=f"A configuration of one node, such as {PROCESSES}:4; default: threads.")
    ] = "",
    cpus: Annotated[int, typer.Option("--cpus-per-task", help="Cores of each task.")] = 1,
    time: Annotated[str, typer.Option(help="The job's time limit, as 8:00:00; default: the partition's.")] = "",
    partition: Annotated[str, typer.Option(help="Default: the cluster's.")] = "",
    out: Annotated[Path | None, typer.Option(help="The run's folder; default: runs/ and the script's name.")] = None,
    restarts: Annotated[int, typer.Option(help="How often the job is queued again after its time limit.")] = 20,
    into: Annotated[Path | None, typer.Option("--write", help="Default: the script's name and .sbatch.")] = None,
) -> None:
    """Writes a batch script for Slurm. At its time limit, and after a lost node, the job is queued again and resumes.

    Examples:

    paceline sbatch -N 4 --cpus-per-task 16 --time 8:00:00 train.py --lr 0.1

    paceline sbatch -N 2 --plan processes:8 --cpus-per-task 2 train.py
    """
    command = [script, *context.args]
    prepare.check_script(command)
    if plan:
        prepare.check_configuration(plan)
    name = Path(command[1] if script == "-m" and len(command) > 1 else script).stem
    job = BatchJob(command, nodes, plan, cpus, time, partition, out or Path("runs", name), restarts)
    path = into or Path(f"{name}.sbatch")
    write(job, path)
    print(f"wrote {path}; start it with: sbatch {path}")
