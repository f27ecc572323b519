"""`paceline verify`: compares training with N nodes to one process."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline import registry
from paceline.cli import options
from paceline.cli.options import console, listed
from paceline.cli.prepare import check_alone, check_script
from paceline.launch.hosts import Way


def verify(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A script that calls paceline.join, with its own arguments.")],
    steps: Annotated[int, typer.Option(help="Number of steps to compare.")] = 10,
    nodes: Annotated[
        int, typer.Option(help="Number of simulated nodes on this machine, without -H and outside a launcher.")
    ] = 2,
    engine: Annotated[str | None, typer.Option(help="Engine of each node; default: sequential.")] = None,
    float32: Annotated[
        bool, typer.Option("--float32", help="Compare in float32, for models that cannot run in float64.")
    ] = False,
    named: options.Hosts = None,
    env: options.Env = None,
    python: options.Python = None,
    address: options.Address = None,
    ssh_command: options.Ssh = "ssh",
) -> None:
    """Checks whether N nodes give the same result as one process, and within what tolerance.

    Under a launcher (RANK is set), this process's node is one of the N nodes. Dropout is switched off.

    Examples:

    paceline verify --engine processes:2 examples/own_loop.py

    paceline verify -H hostA,hostB train.py
    """
    from paceline.planner import verify as verification

    command, hosts = [script, *context.args], listed(named)
    check_script(command)
    dtype = "float32" if float32 else "float64"
    if engine:
        registry.parse("engine", engine)
    if hosts:
        check_alone(hosts)
    way, names = Way(ssh_command, python or sys.executable), (env or "").replace(",", " ").split()
    compared = (
        verification.over_ssh(hosts, way, command, steps, engine or "", dtype, names, address)
        if hosts
        else verification.verify([sys.executable, *command], steps, nodes, engine or registry.BASELINE, dtype)
    )
    if compared is None:
        return
    metric = f", of a metric {compared.metric:.1e}" if compared.metric > compared.tolerance else ""
    console.print(
        f"{compared.steps} steps in {dtype}, dropout off: largest relative difference of the loss {compared.loss:.1e}, "
        f"of a parameter {compared.weight:.1e} ({compared.worst}){metric}; tolerance {compared.tolerance:.0e}"
    )
    for cause in compared.causes:
        console.print(f"- {cause.kind}: {cause.text}\n    {cause.remedy}", markup=False)
    console.print("[green]the same[/green]" if compared.same else "[red]NOT the same[/red]")
    raise typer.Exit(0 if compared.same else 1)
