"""Options that several commands share, and the console that they print to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from paceline import registry

console = Console(highlight=False, soft_wrap=True)
PLAN = (
    f"auto (measured once, then cached), a plan file, or a configuration, as {registry.THREADS}:2 or "
    f"{registry.PROCESSES}:2+channels_last."
)

Model = Annotated[str | None, Option(help=f"One of {', '.join(registry.names('models'))}; or package.module:function.")]
Data = Annotated[
    str | None, Option(help="Folder with one sub-folder of images per class, or a folder that `pack` wrote.")
]
TestFraction = Annotated[float, Option(help="Fraction held out for testing, if there is no test/ folder.")]
SkipBroken = Annotated[bool, Option("--skip-broken", help="Leave out unreadable images.")]
Plan = Annotated[str, Option("--plan", "--engine", help=PLAN)]
Fidelity = Annotated[str, Option(help="What a plan may choose: exact, rounded (16 bits), approximate.")]
Reproducible = Annotated[
    bool,
    Option(
        "--reproducible",
        help=f"Bit-identical weights for any number of nodes: --plan {registry.REPRODUCIBLE}:{registry.SHARES}, or "
        f"{registry.REPRODUCIBLE}:k for k shares.",
    ),
]
Shares = Annotated[
    str | None, Option(help="Part of the batch per node: measured (default), equal, or proportions such as 3,1.")
]
Out = Annotated[Path | None, Option(help="The run's folder: record, checkpoints, weights, plan.")]
Hosts = Annotated[
    list[str] | None,
    Option("-H", "--hosts", help="Hosts, over ssh: hostA,user@hostB, or hostA:4,hostB:2; may be repeated."),
]
Env = Annotated[str | None, Option("--env", help="With -H: environment variables to pass on, as A,B.")]
Python = Annotated[
    str | None, Option("--python", help="With -H: the Python interpreter on the hosts; default: the same path as here.")
]
Address = Annotated[
    str | None, Option("--address", help="With -H: the first host's address for the other hosts; default: as for ssh.")
]
Ssh = Annotated[
    str, Option("--ssh", envvar="PACELINE_SSH", help="With -H: the ssh client and its options, 'ssh -F file'; or srun.")
]
Send = Annotated[
    bool, Option("--send", help="With -H: copy the working tree, as git sees it, and --data; only changes are sent.")
]
Join = Annotated[
    Path | None, Option(help="Join a run that was started with --nodes: the path of its join token, ticket.json.")
]
Nodes = Annotated[
    str | None,
    Option(help="Minimum and maximum, as 2:4: training continues if nodes fail. Without -H, nodes on this machine."),
]
Wait = Annotated[
    float | None, Option(min=0.0, help="Seconds that survivors below the minimum wait for failed nodes; default 600.")
]
Restarts = Annotated[
    int | None,
    Option(min=0, help="How often a failed run is restarted from its newest checkpoint; default 3 with --nodes."),
]
Encrypt = Annotated[bool, Option("--encrypt", help="Encrypt all traffic between nodes with TLS 1.3; needs no setup.")]
Detach = Annotated[bool, Option("--detach", help="Run without this terminal; follow the run with `paceline attach`.")]


def listed(hosts: list[str] | None) -> str | None:
    """All -H options as one list. Raises ValueError if one is empty, such as an unset shell variable."""
    if hosts and not all(map(str.strip, hosts)):
        raise ValueError("-H was given '', which names no host; give hostA,hostB, or leave -H out to train here only")
    return ",".join(hosts) if hosts else None
