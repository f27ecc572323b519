"""Finds or makes the plan of a run, checks the options that commands share, and launches the run on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from paceline import registry
from paceline.checkpoint.run_lock import check_free
from paceline.cli.attach import follow
from paceline.cli.options import console
from paceline.environment import wait_s
from paceline.launch import detach, local
from paceline.launch.child_processes import ChildProcesses
from paceline.launch.hosts import parse
from paceline.launch.machine import survey
from paceline.launch.supervise import trained_alone
from paceline.launch.supervise.node_restarts import RETURNS
from paceline.launch.supervise.restart_policy import RESTARTS
from paceline.link.net.ticket import JoinTicket
from paceline.link.net.tls_mesh import check as check_encryption
from paceline.planner import planner as planning
from paceline.planner.candidates import ROUNDED, split
from paceline.planner.plan_tables import plan_table
from paceline.planner.planner import Plan
from paceline.train.settings import Settings


def ready(
    command: list[str], wanted: str, fidelity: str, settings: Settings | None = None, quiet: bool = False
) -> Plan:
    """The plan requested: a file's, a row by itself, the one kept for this command, or a new one."""
    if wanted != "auto":
        return Plan.read(wanted) if Path(wanted).is_file() else Plan(row(wanted), "as asked for")
    screen = Console(stderr=quiet, highlight=False, soft_wrap=True)
    machine = survey()
    if not quiet:
        screen.print(f"machine: {machine}, torch {importlib.metadata.version('torch')}")
    made, stale = planning.cached(command, fidelity, machine)
    if made:
        os.environ.update(planning.promise(made, command))
    if stale:
        screen.print(f"{stale}; measuring again")
    if made is None:
        if settings and settings != Settings():  # in what nobody has asked for nothing is wrong; torch takes seconds
            from paceline.train.run import check, sources

            check(settings)
            sources(settings)  # before anything is measured; with a plan at hand, the run itself does
        with ChildProcesses(), Console(stderr=True).status("measuring") as status:
            made = planning.make(command, fidelity=fidelity, show=status.update)
        if not quiet:
            show(made, "tried")
    elif not quiet:
        screen.print(f"plan: [bold]{made.chosen}[/bold] ({escape(made.reason)}; measured {made.date})")
    return made


def show(made: Plan, which: str = "all") -> None:
    rows = [row for row in made.rows if which == "all" or row.measured_s is not None or row in made.rows[:1]]
    screen = console if console.is_terminal else Console(highlight=False, width=160)
    screen.print(plan_table(dataclasses.replace(made, rows=tuple(rows))))
    if others := len(made.rows) - len(rows):
        console.print(f"{others} others were not tried; `paceline plan` measures them too")
    console.print(f"plan: [bold]{made.chosen}[/bold] ({escape(made.reason)})")


def row(text: str) -> str:
    """Raises ValueError for what is neither a plan file nor a row."""
    if text.endswith(".toml"):
        raise ValueError(f"there is no plan file {text!r}; write one with: paceline plan --out {text}")
    with contextlib.suppress(ValueError):  # most are seen to be rows without importing torch, which takes seconds
        way = split(text, 1)
        if way.engine in registry.names("engine") and len({*ROUNDED} & {*way.words}) < 2:
            return text
    from paceline.engine.compute.precision import parse_row

    engine, _ = parse_row(text)
    registry.parse("engine", engine)
    return text


@dataclass
class Start:
    """How a run is started, in the options that several commands take. ``restarts``: of the whole run; None: as many as
    one whose nodes may fail has by default. ``names``: environment variables to pass on."""

    hosts: str | None = None
    nodes: str | None = None
    restarts: int | None = None
    names: str | None = None
    python: str | None = None
    address: str | None = None
    ssh: str = "ssh"
    send: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError."""
        self.least, self.count = span(self.nodes, self.hosts)
        by_default = RESTARTS if self.least else 0
        self.num_restarts = by_default if self.restarts is None else self.restarts


def start(
    command: list[str],
    made: Plan,
    out: Path | None,
    how: Start,
    quiet: bool = False,
    shares: str | None = None,
    more: Mapping[str, str] | None = None,
) -> int:
    environment = {**({"PACELINE_SHARES": shares} if shares else {}), **(more or {})}
    if out:
        check_free(out)
        made.write(out / "plan.toml")
        environment["PACELINE_FOLDER"] = str(out)
        if how.least:
            environment["PACELINE_TICKET_FILE"] = str(out / "ticket.json")
    detach.begun()
    code = local.start(
        [sys.executable, *command],
        made.chosen,
        how.count,
        environment,
        least=how.least,
        returns=RETURNS if how.least else 0,
        restarts=how.num_restarts,
        together=trained_alone.exit_code,
    )
    if code == 0 and out and not quiet:
        print(f"run: {out}")
    return code


def leave(words: list[str], hosts: str | None) -> None:
    """With --detach: continues in the detached launcher; this process follows it until it has begun, and exits."""
    if run := detach.leave(words, hosts):
        follow(run, until_begun=True)


def check_alone(hosts: str | None, send: bool = False, data: str | None = None, detached: bool = False) -> None:
    """Raises ValueError for options that need each other, or have no effect."""
    if "RANK" in os.environ and (hosts or detached):
        raise ValueError(
            f"{'-H' if hosts else '--detach'} starts every node from one process, and a launcher started this one as "
            f"one of several (RANK={os.environ['RANK']}); leave it out, or that launcher, or unset RANK"
        )
    if send and not hosts:
        raise ValueError("--send sends to the hosts of -H, and there is none; leave it out, or give -H")
    if data and not send:
        raise ValueError(f"--data {data} needs --send; give --send, or pass the folder in the script's own arguments")


def check_first() -> None:
    """Raises ValueError where a launcher has started this as one of several: each would start a run of its own."""
    if int(size if (size := os.environ.get("WORLD_SIZE", "1")).isdigit() else 1) > 1:
        raise ValueError(
            f"`paceline run` starts all processes of a run by itself, and a launcher has started this one as one of "
            f"{size} (WORLD_SIZE); give that launcher the script: python SCRIPT, or leave the launcher out, or unset "
            f"WORLD_SIZE"
        )


def waits(seconds: float | None) -> None:
    """With --wait: for how long processes started from here on wait for nodes that failed. Raises ValueError."""
    if seconds is not None:
        os.environ["PACELINE_WAIT"] = f"{seconds:g}"
    wait_s()


def hide(asked: bool) -> None:
    """With --encrypt: processes started from here on encrypt. Raises ValueError where they cannot."""
    if asked:
        check_encryption()
        os.environ["PACELINE_ENCRYPT"] = "1"


def span(nodes: str | None, hosts: str | None) -> tuple[int, int]:
    """(the nodes without which training ends, or 0; how many are started). Raises ValueError."""
    count = len(parse(hosts)) if hosts else None
    if nodes is None:
        return 0, count or 1
    words = nodes.split(":")
    numbers = [int(word) for word in words if word.isdigit()]
    if len(words) != len(numbers) or len(numbers) > 2 or not 1 <= numbers[0] <= numbers[-1]:
        raise ValueError(f"--nodes is the fewest and the most nodes, as 2:4 is; got {nodes!r}")
    least, most = numbers[0], numbers[-1]
    if count and not least <= count <= most:
        raise ValueError(f"--nodes {nodes} and {count} hosts of -H do not fit together; give -H from {least} to {most}")
    return least, count or most


def late(ticket: Path | None, nodes: str | None, hosts: str | None) -> dict[str, str]:
    """The environment of a joining node. Raises ValueError."""
    if ticket is None:
        return {}
    if nodes or hosts:
        raise ValueError("--join starts one node, here, that comes to a run; leave --nodes and -H out")
    found = JoinTicket.read(ticket)
    hide(found.hides)
    return {"PACELINE_JOIN_TICKET": str(ticket), "PACELINE_SECRET": found.secret, "PACELINE_NODES": found.nodes}


def check_writable(out: Path) -> None:
    """Raises ValueError where a run could write nothing, before anything is measured."""
    there = next(each for each in (out, *out.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"the run's folder {out} cannot be written: look at {there}, or give another --out")


def check_script(command: list[str]) -> None:
    if command[0] == "-m":
        if len(command) < 2:
            raise ValueError("-m needs a module name, as in: paceline run -m package.module")
    elif command[0].startswith("-") and not Path(command[0]).is_file():
        raise ValueError(
            f"no option {command[0]!r} here: --help lists those there are; options of a script stand behind its path"
        )
    elif not Path(command[0]).is_file():
        raise ValueError(f"no script at {command[0]!r}; give the path of a Python file, or -m and a module")


def steady(plan: str, reproducible: bool) -> str:
    """The plan that --reproducible makes of what was asked for. Raises ValueError for a row that is not."""
    if not reproducible or plan == "auto":
        return planning.STEADY if reproducible else plan
    asked = Plan.read(plan).chosen if Path(plan).is_file() else row(plan)
    if not registry.says("engine", registry.head(asked)[0], "reproduces"):
        raise ValueError(
            f"--reproducible computes in virtual shares, and the row asked for is {asked}; give --plan "
            f"{planning.STEADY}, or leave --plan out"
        )
    return plan
