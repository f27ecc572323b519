"""paceline run"""

from __future__ import annotations

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
    Start,
    check_alone,
    check_first,
    check_script,
    hide,
    late,
    leave,
    ready,
    start,
    start_over_ssh,
    steady,
    waits,
)
from paceline.data.load_balance import wanted


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
    how = Start(hosts, nodes, 0 if join else restarts, env, python, address, ssh_command, send)
    ticket = late(join, nodes, hosts)
    if detach:
        leave(["run", *command], hosts)
    if hosts:
        packed = Path(data) if data else None
        raise typer.Exit(start_over_ssh(how, command, plan, fidelity, out, shares=shares, data=packed))
    raise typer.Exit(start(command, ready(command, plan, fidelity), out, how, shares=shares, more=ticket))
