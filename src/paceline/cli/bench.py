"""paceline bench"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli.options import console


def bench(
    suite: Annotated[
        str, typer.Argument(help="local: this machine against torch by hand and DDP. links: sums against gloo's.")
    ],
    only: Annotated[str | None, typer.Option(help="Tasks or algorithms, separated by commas; see the record.")] = None,
    rounds: Annotated[int, typer.Option(help="Turns of each contender.")] = 7,
    processes: Annotated[int, typer.Option(help="links: processes that add up, all on this machine.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Folder for the record.")] = None,
) -> None:
    """The benchmark suite: contenders by turns, kept as a record.

    Examples:

    paceline bench local --only exact,factors --out benchmarks/mine

    paceline bench links --processes 8
    """
    from paceline.bench import links
    from paceline.bench import local as one_machine

    suites: dict[str, tuple[Any, Any]] = {
        "local": (one_machine.run, one_machine.write),
        "links": (functools.partial(links.run, processes=processes), links.write),
    }
    if suite not in suites:
        raise ValueError(f"no suite named {suite!r}; known: {', '.join(suites)}")
    start, write = suites[suite]
    findings = []
    with Console(stderr=True).status("measuring") as status:
        for finding in start(only.split(",") if only else [], rounds, status.update):
            findings.append(finding)
            mark = "reached" if finding.reached else "NOT reached"
            console.print(f"{finding.what}: {finding.figure}, demanded {finding.demanded}: {mark}")
            if out:
                write(findings, rounds, out)
    if out:
        console.print(f"record: {out}")
