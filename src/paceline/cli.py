"""Parse, call, print; no logic."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from rich.console import Console

from paceline import __version__, find
from paceline import plan as planning
from paceline import verify as verification
from paceline.launch import local
from paceline.train import Settings
from paceline.train import run as run_training

app = typer.Typer(
    help="Trains PyTorch models as fast as the machines you already have allow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False, soft_wrap=True)
AFTER = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def main() -> None:
    """A user's mistake is one message on stderr and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        console.print(f"paceline {__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.command()
def train(
    model: Annotated[str | None, typer.Option(help=f"One of: {', '.join(find.names('models'))}.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with one sub-folder of images per class.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Global batch: over all processes and nodes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of SGD.")] = None,
    engine: Annotated[str, typer.Option(help="auto measures; or sequential, threads:k, processes:k.")] = "auto",
    exchange: Annotated[str, typer.Option(help="How nodes agree, where there are several.")] = "allreduce",
    codec: Annotated[str, typer.Option(help="What a gradient looks like on the wire.")] = "none",
    seed: Annotated[int, typer.Option(help="Equal seeds give equal runs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
) -> None:
    """Trains a model the fastest way this machine allows; without arguments, on an embedded sample.

    Example: paceline train --model alexnet --data ./photos --epochs 5
    """
    settings = Settings(model, data, epochs, batch_size, lr, momentum, seed, codec, exchange, out)
    if "PACELINE_ENGINE" in os.environ or "RANK" in os.environ:
        run_training(settings)
        return
    settings.check()
    find.parse("exchange", exchange)
    find.parse("codec", codec)
    if engine != "auto":
        find.parse("engine", engine)
    settings.out = out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.model_name}"
    arguments = [a for a in sys.argv[1:] if a]
    command = ["-m", "paceline", *arguments]
    memory = psutil.virtual_memory().total / 2**30
    console.print(
        f"machine: {platform.node()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, torch {torch.__version__}"
    )
    if engine == "auto":
        made = _plan(command)
        engine = made.chosen
        console.print(f"plan: [bold]{engine}[/bold] ({made.reason})")
    command = [sys.executable, *command, "--out", str(settings.out)]
    code = local.start(command, engine)
    if code == 0:
        console.print(f"run: {settings.out}")
    raise typer.Exit(code)


def _plan(command: list[str]) -> planning.Plan:
    found, stale = planning.cached(command, "exact")
    if found:
        os.environ.update(planning.promise(found, command))
        return found
    if stale:
        console.print(f"{stale}; measuring again")
    with console.status("measuring") as status:
        made = planning.make(command, show=status.update)
    console.print(planning.table(made))
    return made


@app.command(context_settings=AFTER)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script with its own arguments, or -m and a module.")],
    engine: Annotated[str, typer.Option(help="auto measures; or sequential, threads:k, processes:k.")] = "auto",
) -> None:
    """Starts a script everywhere it should run.

    Example: paceline run --engine processes:2 examples/own_loop.py
    """
    command = [script, *context.args]
    _check_script(command)
    if engine == "auto":
        made = _plan(command)
        engine = made.chosen
        console.print(f"plan: [bold]{engine}[/bold] ({made.reason})")
    else:
        find.parse("engine", engine)
    raise typer.Exit(local.start([sys.executable, *command], engine))


@app.command(context_settings=AFTER)
def verify(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A script that calls paceline.join, with its own arguments.")],
    steps: Annotated[int, typer.Option(help="Steps to compare.")] = 10,
    nodes: Annotated[int, typer.Option(help="Nodes to pretend on this machine, outside a launcher.")] = 2,
    engine: Annotated[str, typer.Option(help="Each node's engine.")] = "sequential",
    float32: Annotated[
        bool, typer.Option("--float32", help="Compare in float32, for what float64 cannot run.")
    ] = False,
) -> None:
    """N nodes against one process: is the result the same, within what tolerance?

    Under a launcher (RANK is set) this process's node is one of the N. Dropout is switched off.
    """
    command = [script, *context.args]
    _check_script(command)
    dtype = "float32" if float32 else "float64"
    find.parse("engine", engine)
    compared = verification.verify([sys.executable, *command], steps, nodes, engine, dtype)
    if compared is None:
        return
    console.print(
        f"{compared.steps} steps in {dtype}, dropout off: largest relative difference of the loss {compared.loss:.1e}, "
        f"of a parameter {compared.weight:.1e} ({compared.worst}); tolerance {compared.tolerance:.0e}"
    )
    if compared.batch_norm and not compared.same:
        console.print("the model normalises over batches, and each process over its own rows (exact, local BN)")
    console.print("[green]the same[/green]" if compared.same else "[red]NOT the same[/red]")
    raise typer.Exit(0 if compared.same else 1)


def _check_script(command: list[str]) -> None:
    if command[0] == "-m":
        if len(command) < 2:
            raise ValueError("-m needs a module name, as in: paceline run -m package.module")
    elif not Path(command[0]).is_file():
        raise ValueError(f"no script at {command[0]!r}; give the path of a Python file, or -m and a module")


@app.command(name="list")
def list_() -> None:
    """Every engine, exchange, codec, link and model: one line each."""
    for room in find.ROOMS:
        for name in find.names(room):
            print(f"{room:10}{name:12}{find.describe(room, name)}")
