"""`paceline sbatch`: writes a batch script for Slurm."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import prepare
from paceline.launch.batch_script import MAX_RESTARTS, BatchJob, write
from paceline.planner import ddp_script
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
    restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"How often the job is queued again after its time limit; default: {MAX_RESTARTS}, and 0 for a script "
            f"of DistributedDataParallel, which resumes by itself, if it does.",
        ),
    ] = None,
    into: Annotated[Path | None, typer.Option("--write", help="Default: the script's name and .sbatch.")] = None,
) -> None:
    """Writes a batch script for Slurm. At its time limit, and after a lost node, the job is queued again and resumes.

    -N, --cpus-per-task, --time and --partition may also follow the script; a script's own of these names follow --.

    Examples:

    paceline sbatch -N 4 --cpus-per-task 16 --time 8:00:00 train.py --lr 0.1

    paceline sbatch -N 2 --plan processes:8 --cpus-per-task 2 train.py
    """
    arguments, asked = behind_script(context.args)
    command = [script, *arguments]
    prepare.check_script(command)
    nodes = nodes if asked.nodes is None else asked.nodes
    cpus = cpus if asked.cpus_per_task is None else asked.cpus_per_task
    time, partition = asked.time or time, asked.partition or partition
    if plan:
        prepare.check_configuration(plan)
    name = Path(command[1] if script == "-m" and len(command) > 1 else script).stem
    module = "paceline.ddp" if ddp_script.used(command) else ""
    job = BatchJob(command, nodes, plan, cpus, time, partition, out or Path("runs", name), restarts, module)
    path = into or Path(f"{name}.sbatch")
    write(job, path)
    size = f"{job.nodes} node{'s' * (job.nodes > 1)}, {job.tasks} task{'s' * (job.tasks > 1)} each"
    print(f"wrote {path} ({size}); start it with: sbatch {path}")


def behind_script(words: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
    """A script's own arguments, and the options of Slurm's among them. Raises ValueError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-N", "--nodes", type=int)
    parser.add_argument("--cpus-per-task", type=int)
    parser.add_argument("--time")
    parser.add_argument("--partition")
    if words[:1] == ["--"]:
        return list(words[1:]), parser.parse_args([])
    try:
        asked, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}; the script's own options of this name follow --") from None
    return others, asked
