"""`paceline attach`: follows or stops a detached run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline.launch import detach
from paceline.launch.supervise.takeover import take_over


def attach(
    run: Annotated[
        str | None, typer.Argument(help="Id of a run that was started with --detach; default: list all.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the run as Ctrl-C would, and wait for its end.")] = False,
) -> None:
    """Follows a detached run to its end and exits with its exit code; Ctrl-C leaves it running.

    If the launcher of a run on hosts was killed, a new launcher starts and finds the nodes.

    Examples:

    paceline attach

    paceline attach 0117

    paceline attach --stop 0117
    """
    if run is None:
        if stop:
            raise ValueError("--stop needs the id of a run; `paceline attach` lists all")
        for one in detach.all_runs():
            code = "cut off" if one.code is None else f"exit code {one.code}"
            state = "runs" if one.running else "no launcher" if one.launcher_killed else code
            about = one.about
            print(f"{one.id}  {state:14}{about['date']}  {about['folder']}: {' '.join(about['command'])}")
        return
    found = detach.find(run)
    if detach.assume_launcher_role():
        raise typer.Exit(take_over(found))
    if found.launcher_killed:
        detach.replace(found)
        found.wait_begun()
    if stop:
        found.interrupt()
    follow(found)


def follow(run: detach.Detached, until_begun: bool = False) -> None:
    """Follows a run and exits with its exit code; with ``until_begun``, exits with 0 as soon as the run has begun."""
    code: int | None = 130
    try:
        code = run.follow(sys.stdout.buffer, until_begun)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    if code is None or run.running:
        print(f"{run.id} continues; paceline attach {run.id} follows it, --stop ends it", file=sys.stderr)
    raise typer.Exit(code or 0)
