"""The nodes of a Slurm allocation: `srun` starts Python on them, where no ssh may be allowed."""

from __future__ import annotations

import os
import subprocess

from paceline.launch.hosts import SRUN

LIMIT_S = 10.0


def nodes() -> list[str]:
    """Their names, where this process is in an allocation; an empty list elsewhere.

    Raises ValueError where it is one of several tasks, each of which would ask for all nodes, or if Slurm does not
    tell.
    """
    if not (names := os.environ.get("SLURM_JOB_NODELIST")):
        return []
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in os.environ and tasks != "1":
        raise ValueError(
            f"srun has started {tasks} of this command, and one reaches all nodes of the allocation; start it once, "
            f"without srun"
        )
    command = ["scontrol", "show", "hostnames", names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        said = "" if done.returncode == 0 and done.stdout.strip() else done.stderr.strip() or f"exit {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        raise ValueError(
            f"the nodes of this allocation (SLURM_JOB_NODELIST={names}) cannot be listed by scontrol ({said}); name "
            f"them with -H"
        )
    return done.stdout.split()


def reached(hosts: str | None, ssh: str) -> tuple[str | None, str]:
    """(all nodes of an allocation of several where no ``hosts`` are named, the command that reaches them): srun for
    nodes of the allocation, unless ``ssh`` is not the default."""
    if hosts and ssh != "ssh":
        return hosts, ssh
    allocated = nodes()
    if hosts:
        return hosts, SRUN if set(hosts.split(",")) <= set(allocated) else ssh
    return (",".join(allocated), SRUN) if len(allocated) > 1 else (None, ssh)
