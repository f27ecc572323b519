"""paceline run"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import (
    AddressOption,
    DetachOption,
    EncryptOption,
    EnvOption,
    FidelityOption,
    HostsOption,
    JoinOption,
    NodesOption,
    OutOption,
    PlanOption,
    PythonOption,
    ReproducibleOption,
    RestartsOption,
    SendOption,
    SharesOption,
    SshOption,
    WaitOption,
    listed,
)
from paceline.cli.prepare import (
    check_alone,
    check_first,
    check_script,
    hide,
    late,
    leave,
    ready,
    span,
    start,
    start_over_ssh,
    steady,
    waits,
)
from paceline.data.load_balance import wanted
from paceline.launch.hosts import Way


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script with its own arguments, or -m and a module.")],
    plan: PlanOption = "auto",
    fidelity: FidelityOption = "exact",
    shares: SharesOption = None,
    reproducible: ReproducibleOption = False,
    out: OutOption = None,
    named: HostsOption = None,
    nodes: NodesOption = None,
    wait: WaitOption = None,
    restarts: RestartsOption = None,
    join: JoinOption = None,
    env: EnvOption = None,
    python: PythonOption = None,
    address: AddressOption = None,
    ssh_command: SshOption = "ssh",
    send: SendOption = False,
    data: Annotated[str | None, typer.Option(help="With --send: a data folder to copy as well.")] = None,
    encrypt: EncryptOption = False,
    detach: DetachOption = False,
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
    """
    command, hosts = [script, *context.args], listed(named)
    check_script(command)
    plan = steady(plan, reproducible)
    wanted(shares or "measured")
    check_alone(hosts, send, data, detach)
    check_first()
    hide(encrypt)
    waits(wait)
    least, most = span(nodes, hosts)
    ticket = late(join, nodes, hosts)
    if detach:
        leave(["run", *command], hosts)
    if hosts:
        way = Way(ssh_command, python or sys.executable)
        packed = Path(data) if data else None
        over = start_over_ssh(
            hosts,
            way,
            command,
            plan,
            fidelity,
            out,
            env,
            address,
            shares=shares,
            send=send,
            data=packed,
            least=least,
            most=int(nodes.split(":")[-1]) if nodes else 0,
            restarts=restarts,
        )
        raise typer.Exit(over)
    made = ready(command, plan, fidelity)
    again = 0 if join else restarts
    code = start(command, made, out, shares=shares, num_nodes=most, least=least, more=ticket, restarts=again)
    raise typer.Exit(code)
