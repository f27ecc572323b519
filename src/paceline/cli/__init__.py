"""The command line: parses options, calls the package, and prints; no logic. Commands import torch only if needed."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Annotated

import typer

from paceline import __version__, environment
from paceline.cli import attach, bench, doctor, pack, plan, report, run, sbatch, train, verify
from paceline.launch.output import shown
from paceline.report.log import configure

__all__ = ["app", "main"]

app = typer.Typer(
    help="Trains PyTorch models on one machine or several, with the fastest configuration for them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
AFTER = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def main() -> None:
    """Runs a command. A user error gives one message on stderr and exit code 2."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the end
    try:
        configure()
        environment.set_from_launcher()
        app()
    except (ValueError, ConnectionError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        print(f"paceline: {shown(str(error))}", file=sys.stderr)
        sys.exit(2)
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # the reader closed the pipe; the flush at exit must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the versions.")] = False) -> None:
    if version:
        print(f"paceline {__version__}, torch {importlib.metadata.version('torch')}")
        raise typer.Exit


app.command()(train.train)
app.command(context_settings=AFTER)(plan.plan)
app.command(context_settings=AFTER)(run.run)
app.command(context_settings=AFTER)(sbatch.sbatch)
app.command()(attach.attach)
app.command()(pack.pack)
app.command()(report.predict)
app.command()(report.report)
app.command()(report.track)
app.command(context_settings=AFTER)(verify.verify)
app.command(name="list")(report.list_)
app.command()(doctor.doctor)
app.command()(bench.bench)
