"""What train, run and plan share: a plan at hand or made, and the start."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import sys
from pathlib import Path

from rich.console import Console

from paceline import find
from paceline import plan as planning
from paceline.cli.options import console
from paceline.launch import local, ssh
from paceline.launch.check import check
from paceline.launch.hosts import Way, parse
from paceline.launch.hosts import row as row_of
from paceline.plan import Plan
from paceline.probe import shelf
from paceline.probe.survey import survey
from paceline.settings import Settings


def ready(
    command: list[str], wanted: str, fidelity: str, settings: Settings | None = None, quiet: bool = False
) -> Plan:
    """The plan asked for: a file's, a row by itself, the one kept for this command, or a new one."""
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
        if settings:
            from paceline.train import check, sources

            check(settings)
            sources(settings)  # before anything is measured; with a plan at hand, the run itself does
        with Console(stderr=True).status("measuring") as status:
            made = planning.make(command, fidelity=fidelity, show=status.update)
        if not quiet:
            show(made, "tried")
    elif not quiet:
        screen.print(f"plan: [bold]{made.chosen}[/bold] ({made.reason}; measured {made.date})")
    return made


def show(made: Plan, which: str = "all") -> None:
    rows = [row for row in made.rows if which == "all" or row.measured_s is not None]
    screen = console if console.is_terminal else Console(highlight=False, width=160)
    screen.print(planning.table(dataclasses.replace(made, rows=tuple(rows))))
    if others := len(made.rows) - len(rows):
        console.print(f"{others} others were not tried; `paceline plan` measures them too")
    console.print(f"plan: [bold]{made.chosen}[/bold] ({made.reason})")


def row(text: str) -> str:
    """Raises ValueError for what is neither a plan file nor a row."""
    from paceline.engine.numerics import parse_row

    if text.endswith(".toml"):
        raise ValueError(f"there is no plan file {text!r}; write one with: paceline plan --out {text}")
    engine, _ = parse_row(text)
    find.parse("engine", engine)
    return text


def start(command: list[str], made: Plan, out: Path | None, quiet: bool = False, shares: str | None = None) -> int:
    environment = {"PACELINE_SHARES": shares} if shares else {}
    if out:
        out.mkdir(parents=True, exist_ok=True)
        made.write(out / "plan.toml")
        environment["PACELINE_FOLDER"] = str(out)
    code = local.start([sys.executable, *command], made.chosen, environment=environment)
    if code == 0 and out and not quiet:
        console.print(f"run: {out}")
    return code


def start_over_ssh(
    hosts: str,
    way: Way,
    command: list[str],
    plan: str,
    out: Path | None,
    names: str | None,
    address: str | None,
    paths: list[str],
    settings: Settings | None = None,
    shares: str | None = None,
) -> int:
    nodes = parse(hosts)
    engine = os.environ.get("PACELINE_ENGINE", "") if plan == "auto" else plan
    made = shelf.over([node.name for node in nodes], command) if plan == "auto" and not engine else None
    if engine:
        made = Plan.read(engine) if Path(engine).is_file() else None
        engine = row(engine) if made is None else ""
    if made:
        engine = made.row_of_all([node.name for node in nodes])
        print(f"plan: {engine or 'threads on each host'} ({made.reason}; measured {made.date})", file=sys.stderr)
    chosen, environment = row_of(nodes, engine), ssh.carried(names.replace(",", " ").split() if names else ())
    if shares:
        environment["PACELINE_SHARES"] = shares
    if out:
        environment["PACELINE_FOLDER"] = str(out)
    meeting = check(nodes, way, paths, address)
    if settings and out:
        settings.write(out)
    code = ssh.start(nodes, command, chosen, way, environment, meeting)
    if code == 0 and out:
        console.print(f"run: {out} on {nodes[0].name}")
    return code


def check_alone() -> None:
    if "RANK" in os.environ:
        raise ValueError(
            f"-H starts every node from one process, and a launcher started this one as one of several "
            f"(RANK={os.environ['RANK']}); leave out -H or that launcher, or unset RANK"
        )


def check_script(command: list[str]) -> None:
    if command[0] == "-m":
        if len(command) < 2:
            raise ValueError("-m needs a module name, as in: paceline run -m package.module")
    elif not Path(command[0]).is_file():
        raise ValueError(f"no script at {command[0]!r}; give the path of a Python file, or -m and a module")
