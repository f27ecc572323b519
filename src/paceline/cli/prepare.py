"""Finds or makes the plan of a run, checks the options that commands share, and launches the run on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from paceline import registry
from paceline.checkpoint.run_lock import check_free
from paceline.cli.attach import follow
from paceline.cli.measuring import Measuring
from paceline.cli.options import console
from paceline.ddp import import_hook
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
from paceline.planner import ddp_script
from paceline.planner import planner as planning
from paceline.planner.candidates import ROUNDED, split
from paceline.planner.plan_tables import plan_table
from paceline.planner.planner import Plan
from paceline.train.settings import Settings


def find_or_make_plan(
    command: list[str], choice: str, fidelity: str, settings: Settings | None = None, quiet: bool = False
) -> Plan:
    """The plan of a run: from a file, of a single configuration, the cached plan of this command, or a new one."""
    if choice != "auto":
        return Plan.read(choice) if Path(choice).is_file() else Plan(check_configuration(choice), "as requested")
    screen = Console(stderr=quiet, highlight=False, soft_wrap=True)
    machine = survey()
    if not quiet:
        screen.print(f"machine: {machine}, torch {importlib.metadata.version('torch')}")
    plan, stale = planning.cached(command, fidelity, machine)
    if plan:
        os.environ.update(planning.promise(plan, command))
    if stale:
        screen.print(f"{stale}; measuring again")
    if plan is None:
        if settings and settings != Settings():  # defaults need no check, and importing torch takes seconds
            from paceline.train.run import check, sources

            check(settings)
            sources(settings)  # before any measurement; with a cached plan, the run itself checks
        with ChildProcesses(), Measuring() as progress:
            plan = planning.make(command, fidelity=fidelity, show=progress.show, tell=progress.tell)
        if not quiet:
            show(plan, "tried")
    elif not quiet:
        screen.print(f"plan: [bold]{plan.chosen}[/bold] ({escape(plan.reason)}; measured {plan.date})")
    return plan


def show(plan: Plan, which: str = "all") -> None:
    rows = [row for row in plan.rows if which == "all" or row.measured_s is not None or row in plan.rows[:1]]
    screen = console if console.is_terminal else Console(highlight=False, width=160)
    screen.print(plan_table(dataclasses.replace(plan, rows=tuple(rows))))
    if others := len(plan.rows) - len(rows):
        console.print(f"{others} others were not tried; `paceline plan --all` measures them too")
    console.print(f"plan: [bold]{plan.chosen}[/bold] ({escape(plan.reason)})")


def check_configuration(text: str) -> str:
    """Returns a valid configuration unchanged. Raises ValueError for any other text."""
    if text.endswith(".toml"):
        raise ValueError(f"there is no plan file {text!r}; write one with: paceline plan --out {text}")
    with contextlib.suppress(ValueError):  # the common case avoids the import of torch, which takes seconds
        spec = split(text, 1)
        if "=" not in text and spec.engine in registry.names("engine") and len({*ROUNDED} & {*spec.words}) < 2:
            return text
    from paceline.engine.compute.precision import parse_row

    engine, _ = parse_row(text)
    registry.parse("engine", engine)
    return text


@dataclass
class Start:
    """The launch options that several commands share. ``restarts``: restarts of the whole run; None: RESTARTS if nodes
    may fail, else 0. ``names``: environment variables to pass on."""

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
        self.min_nodes, self.count = span(self.nodes, self.hosts)
        by_default = RESTARTS if self.min_nodes else 0
        self.num_restarts = by_default if self.restarts is None else self.restarts


def start(
    command: list[str],
    plan: Plan,
    out: Path | None,
    how: Start,
    quiet: bool = False,
    shares: str | None = None,
    more: Mapping[str, str] | None = None,
) -> int:
    environment = {**({"PACELINE_SHARES": shares} if shares else {}), **(more or {})}
    if out:
        check_free(out)
        plan.write(out / "plan.toml")
        environment["PACELINE_FOLDER"] = str(out)
        if how.min_nodes:
            environment["PACELINE_TICKET_FILE"] = str(out / "ticket.json")
    detach.mark_begun()
    code = local.start(
        [sys.executable, *command],
        plan.chosen,
        how.count,
        environment,
        min_nodes=how.min_nodes,
        returns=RETURNS if how.min_nodes else 0,
        restarts=how.num_restarts,
        together=trained_alone.exit_code,
    )
    if code == 0 and out and not quiet:
        print(f"run: {out}")
    return code


def run_detached(command_line: list[str], hosts: str | None) -> None:
    """With --detach: a detached launcher takes over; this process follows it until the run has begun, and exits."""
    if run := detach.start_detached(command_line, hosts):
        follow(run, until_begun=True)


def check_alone(hosts: str | None, send: bool = False, data: str | None = None, detached: bool = False) -> None:
    """Raises ValueError for options that need each other or would have no effect."""
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
    """Raises ValueError if a launcher started several of these processes, each of which would start its own run."""
    if int(size if (size := os.environ.get("WORLD_SIZE", "1")).isdigit() else 1) > 1:
        raise ValueError(
            f"`paceline run` starts all processes of a run by itself, and a launcher has started this one as one of "
            f"{size} (WORLD_SIZE); give that launcher the script: python SCRIPT, or leave the launcher out, or unset "
            f"WORLD_SIZE"
        )


def set_wait(seconds: float | None) -> None:
    """With --wait: sets how long survivors below the minimum wait for failed nodes. Raises ValueError."""
    if seconds is not None:
        os.environ["PACELINE_WAIT"] = f"{seconds:g}"
    wait_s()


def require_encryption(requested: bool) -> None:
    """With --encrypt: makes all processes of the run encrypt. Raises ValueError if they cannot."""
    if requested:
        check_encryption()
        os.environ["PACELINE_ENCRYPT"] = "1"


def span(nodes: str | None, hosts: str | None) -> tuple[int, int]:
    """(minimum number of nodes, or 0; number of nodes to start), from --nodes and -H. Raises ValueError."""
    count = len(parse(hosts)) if hosts else None
    if nodes is None:
        return 0, count or 1
    parts = nodes.split(":")
    numbers = [int(part) for part in parts if part.isdigit()]
    if len(parts) != len(numbers) or len(numbers) > 2 or not 1 <= numbers[0] <= numbers[-1]:
        raise ValueError(f"--nodes takes the minimum and the maximum number of nodes, as 2:4; got {nodes!r}")
    min_nodes, max_nodes = numbers[0], numbers[-1]
    if count and not min_nodes <= count <= max_nodes:
        raise ValueError(f"--nodes {nodes} excludes {count} hosts of -H; give -H from {min_nodes} to {max_nodes} hosts")
    return min_nodes, count or max_nodes


def join_environment(ticket: Path | None, nodes: str | None, hosts: str | None) -> dict[str, str]:
    """The environment of a node that joins a running training. Raises ValueError."""
    if ticket is None:
        return {}
    if nodes or hosts:
        raise ValueError("--join starts one node on this machine, which joins a run; leave --nodes and -H out")
    found = JoinTicket.read(ticket)
    require_encryption(found.hides)
    return {"PACELINE_JOIN_TICKET": str(ticket), "PACELINE_SECRET": found.secret, "PACELINE_NODES": found.nodes}


def check_writable(out: Path) -> None:
    """Raises ValueError, before any measurement, if the run's folder is not writable."""
    parent = next(each for each in (out, *out.absolute().parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"the run's folder {out} cannot be written: check {parent}, or give another --out")


def check_script(command: list[str]) -> None:
    if command[0] == "-m":
        if len(command) < 2:
            raise ValueError("-m needs a module name, as in: paceline run -m package.module")
    elif command[0].startswith("-") and not Path(command[0]).is_file():
        raise ValueError(
            f"no option {command[0]!r} here: --help lists all options; put the options of a script after its path"
        )
    elif not Path(command[0]).is_file():
        raise ValueError(f"no script at {command[0]!r}; give the path of a Python file, or -m and a module")


def note_behind_script(command: Sequence[str]) -> None:
    """Says that options of `paceline run` which follow the script are the script's."""
    words = [word.partition("=")[0] for word in command[1:]]
    if given := [word for word in words if word in ("--plan", "--nodes", "-H", "--hosts", "--restarts", "--ddp-off")]:
        text = f"{', '.join(given)} after {command[0]} is an argument of the script; options of paceline go before it"
        console.print(text, markup=False)


def plan_of_ddp(command: list[str], choice: str, alone: bool) -> str:
    """The value of --plan for a script that divides its own work among processes, which no plan could do better. Says
    in the environment who starts them. ``alone``: this is the only node."""
    os.environ.pop(import_hook.STARTED_BY, None)  # of a launcher that has started this one
    if not (used := ddp_script.used(command)):
        return choice
    script = ddp_script.starts_processes(command) and choice == "auto" and alone
    os.environ[import_hook.STARTED_BY] = import_hook.SCRIPT if script else import_hook.RUN
    if choice != "auto":
        return choice
    many = f"a process on each node, and with --plan {registry.PROCESSES}:k so many, each with a batch of its own"
    console.print(f"{command[0]} uses {used}: {'it starts its processes itself' if script else many}")
    return registry.BASELINE


def reproducible_plan(plan: str, reproducible: bool) -> str:
    """The value of --plan with --reproducible. Raises ValueError for a configuration that is not reproducible."""
    if not reproducible or plan == "auto":
        return planning.DETERMINISTIC if reproducible else plan
    requested = Plan.read(plan).chosen if Path(plan).is_file() else check_configuration(plan)
    if not registry.says("engine", registry.head(requested)[0], "reproduces"):
        raise ValueError(
            f"--reproducible computes in virtual shares, and the requested configuration is {requested}; give --plan "
            f"{planning.DETERMINISTIC}, or leave --plan out"
        )
    return plan
