"""A batch script for Slurm: one task per node, or one per process, with the run's secret in a file, and resumption.

time limit      Slurm sends SIGTERM to all tasks NOTICE_S before it; the step is finished, all is saved, and the
                job is queued again
a lost node     Slurm queues the job again by itself, as the script permits (--requeue)
afterwards      the job resumes from its newest checkpoint

A script of DistributedDataParallel resumes by itself, if it does: nobody can see that, so after its time limit it is
queued again only as often as is asked for.
"""

from __future__ import annotations

import re
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.signals import RESUME_CODE
from paceline.registry import head, says

MAX_RESTARTS = 20
NOTICE_S = 120  # for the last step and the checkpoint
TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d(:\d\d)?)?")  # as Slurm reads it
MARK = "# Written by `paceline sbatch`"
TEMPLATE = """#!/bin/bash
{settings}
#SBATCH --requeue

{mark}; start it with: sbatch THIS_FILE
cd {folder} || exit 1
export PACELINE_FOLDER={out}
{engine}secret={out}/secret  # who knows it may join the run: a file of this user alone
[ -s "$secret" ] || (umask 077; {python} -c "import secrets; print(secrets.token_hex(32))" > "$secret")
PACELINE_SECRET=$(cat "$secret"); export PACELINE_SECRET
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then export PACELINE_RESUME=1; fi

srun --cpus-per-task={cpus} {python} {module}{command}
code=$?
# {stopped}: stopped before the time limit; {resume}: too few nodes are left. {saved}
if [ $code -eq {stopped} ] || [ $code -eq {resume} ]; then
    if {resumes}[ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit $code
"""


@dataclass(frozen=True)
class BatchJob:
    """``command``: a script and its arguments. ``plan``: a configuration, or "" for that of the script. ``cpus``: per
    task. Raises ValueError for what Slurm would refuse."""

    command: Sequence[str]
    nodes: int = 1
    plan: str = ""
    cpus: int = 1
    time: str = ""
    partition: str = ""
    out: Path = Path("runs")
    restarts: int | None = None  # None: of a script that saves by itself none, else MAX_RESTARTS
    module: str = ""  # that runs a script of DistributedDataParallel, which saves by itself, if it does

    def __post_init__(self) -> None:
        for name in ("nodes", "cpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is a number from 1, got {getattr(self, name)}")
        if self.time and not TIME.fullmatch(self.time):
            raise ValueError(f"--time is minutes, or HH:MM:SS, or D-HH:MM:SS, got {self.time!r}")

    @property
    def tasks(self) -> int:
        """Tasks of each node."""
        name, count = head(self.plan)
        return int(count or 1) if self.plan and says("engine", name, "starts_processes") else 1

    def text(self) -> str:
        name = Path(self.command[1] if self.command[0] == "-m" else self.command[0]).stem
        settings = {
            "job-name": name,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks,
            "cpus-per-task": self.cpus,
            "time": self.time,
            "partition": self.partition,
            "signal": f"TERM@{NOTICE_S}",
            "open-mode": "append",
            "output": self.out / "slurm-%j.out",
        }
        out = shlex.quote(str(self.out))
        most = self.restarts if self.restarts is not None else 0 if self.module else MAX_RESTARTS
        return TEMPLATE.format(
            settings="\n".join(
                f"#SBATCH --{key}={shlex.quote(str(value))}" for key, value in settings.items() if value
            ),
            mark=MARK,
            folder=shlex.quote(str(Path.cwd())),
            out=out,
            engine=f"export PACELINE_ENGINE={shlex.quote(self.plan)}\n" if self.plan else "",
            python=shlex.quote(sys.executable),
            cpus=self.cpus,
            module=f"-m {self.module} " if self.module else "",
            command=shlex.join(self.command),
            saved="The script resumes as it is written to" if self.module else "In both cases all is saved",
            resumes="" if self.module else f"ls -d {out}/checkpoint-* > /dev/null 2>&1 && ",
            restarts=most,
            stopped=128 + signal.SIGTERM,
            resume=RESUME_CODE,
        )


def write(job: BatchJob, path: Path) -> None:
    """Raises ValueError where another file is in its place."""
    if path.exists() and MARK not in path.read_text(errors="replace"):
        raise ValueError(f"{path} exists and was not written by `paceline sbatch`; give another name with --write")
    job.out.mkdir(parents=True, exist_ok=True)
    path.write_text(job.text())
