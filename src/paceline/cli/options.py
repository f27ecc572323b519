"""The options that several commands take, and where they print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline import registry

console = Console(highlight=False, soft_wrap=True)
PLAN = "auto (measured once, then kept), a plan file, or a row such as threads:2, processes:2+channels_last."

ModelOption = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(registry.names('models'))}; or package.module:function.")
]
DataOption = Annotated[
    str | None, typer.Option(help="Folder with one sub-folder of images per class, or what `pack` wrote.")
]
PlanOption = Annotated[str, typer.Option("--plan", "--engine", help=PLAN)]
FidelityOption = Annotated[str, typer.Option(help="What may be chosen: exact, rounded (16 bits), approximate.")]
ReproducibleOption = Annotated[
    bool,
    typer.Option(
        "--reproducible",
        help="The same bits for any number of nodes, by --plan virtual:8, or as many shares as that says.",
    ),
]
SharesOption = Annotated[
    str | None, typer.Option(help="Rows of each node: measured (also without it), equal, or as 3,1.")
]
OutOption = Annotated[Path | None, typer.Option(help="The run's folder: record, checkpoints, weights, plan.")]
HostsOption = Annotated[
    list[str] | None,
    typer.Option(
        "-H", "--hosts", help="Over ssh on each of these: hostA,user@hostB, or hostA:4,hostB:2; several times."
    ),
]
EnvOption = Annotated[str | None, typer.Option("--env", help="With -H: variables that go along, A,B.")]
PythonOption = Annotated[
    str | None, typer.Option("--python", help="With -H: the interpreter there, if not this one's path.")
]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="With -H: the first host's, as the others reach it; else as ssh did.")
]
SshOption = Annotated[
    str, typer.Option("--ssh", envvar="PACELINE_SSH", help="With -H: the client and its options, 'ssh -F file'.")
]
SendOption = Annotated[
    bool, typer.Option("--send", help="With -H: the working tree, as git sees it, and --data go along; what changed.")
]
JoinOption = Annotated[
    Path | None,
    typer.Option(help="The ticket.json of a run that was started with --nodes: this node comes to it late."),
]
NodesOption = Annotated[
    str | None,
    typer.Option(help="Fewest and most, as 2:4: others may be lost, and training goes on. Without -H: so many here."),
]
WaitOption = Annotated[
    float | None,
    typer.Option(min=0.0, help="Seconds for which nodes below the minimum wait for those that failed; default 600."),
]
RestartsOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="How often a run that failed is started again, from its newest checkpoint; default 3 with --nodes.",
    ),
]
EncryptOption = Annotated[
    bool,
    typer.Option("--encrypt", help="All that goes between nodes is encrypted, by TLS 1.3, without any setting up."),
]
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Goes on without this terminal; `paceline attach` follows it.")
]


def listed(hosts: list[str] | None) -> str | None:
    """-H given several times is one list. Raises ValueError where one is empty, as a variable that is not set is."""
    if hosts and not all(map(str.strip, hosts)):
        raise ValueError("-H was given '', which names no host; give hostA,hostB, or leave -H out to train here alone")
    return ",".join(hosts) if hosts else None
