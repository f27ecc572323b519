"""`paceline run`: launches a script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options, over_ssh, prepare
from paceline.cli.options import listed
from paceline.data.load_balance import parse_shares
from paceline.ddp import import_hook


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script with its own arguments, or -m and a module.")],
    plan: options.Plan = "auto",
    fidelity: options.Fidelity = "exact",
    shares: options.Shares = None,
    reproducible: options.Reproducible = False,
    out: options.Out = None,
    named: options.Hosts = None,
    nodes: options.Nodes = None,
    wait: options.Wait = None,
    restarts: options.Restarts = None,
    join: options.Join = None,
    env: options.Env = None,
    python: options.Python = None,
    address: options.Address = None,
    ssh_command: options.Ssh = "ssh",
    send: options.Send = False,
    data: Annotated[str | None, typer.Option(help="With --send: a data folder to copy as well.")] = None,
    encrypt: options.Encrypt = False,
    detach: options.Detach = False,
    ddp_off: Annotated[
        bool, typer.Option("--ddp-off", help="Leave torch's own DistributedDataParallel in a script that uses it.")
    ] = False,
) -> None:
    """Launches a script, on this machine or on several hosts.

    Examples:

    paceline run examples/own_loop.py

    paceline run --plan processes:2 --out runs/mine train.py --my-option 3

    paceline run -H hostA,hostB train.py

    paceline run -H hostA,hostB,hostC --nodes 2:3 train.py

    paceline run -H hostA,hostB --encrypt train.py

    paceline run -H hostA,hostB --send --detach train.py

    paceline run --join runs/mine/ticket.json train.py

    paceline run --plan processes:2 ddp.py
    """
    command, hosts = [script, *context.args], listed(named)
    prepare.check_script(command)
    prepare.note_behind_script(command)
    plan = prepare.reproducible_plan(plan, reproducible)
    parse_shares(shares or "measured")
    prepare.check_alone(hosts, send, data, detach)
    prepare.check_first()
    prepare.require_encryption(encrypt)
    prepare.set_wait(wait)
    if ddp_off:
        os.environ[import_hook.VARIABLE] = import_hook.OFF
    plan = prepare.plan_of_ddp(command, plan, not (hosts or nodes or join))
    how = prepare.Start(hosts, nodes, 0 if join else restarts, env, python, address, ssh_command, send)
    joining = prepare.join_environment(join, nodes, hosts)
    if detach:
        prepare.run_detached(["run", *command], hosts)
    if hosts:
        packed = Path(data) if data else None
        raise typer.Exit(over_ssh.start(how, command, plan, fidelity, out, shares=shares, data=packed))
    made = prepare.find_or_make_plan(command, plan, fidelity)
    raise typer.Exit(prepare.start(command, made, out, how, shares=shares, more=joining))
