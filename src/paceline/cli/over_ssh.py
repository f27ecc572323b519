"""Launches a run on hosts over ssh: chooses each host's configuration, copies the working tree, starts the nodes."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from rich.console import Console

from paceline.checkpoint.run_lock import check_free
from paceline.cli.prepare import Start, row
from paceline.data import load_balance
from paceline.launch import detach, ssh
from paceline.launch.deploy import snapshot
from paceline.launch.deploy.packages import needed
from paceline.launch.deploy.send import send as deliver
from paceline.launch.doctor.preflight import check
from paceline.launch.hosts import Host, Way, parse, rows
from paceline.launch.supervise.takeover import Launch
from paceline.planner import plan_cache
from paceline.planner.planner import Plan
from paceline.train.settings import Settings

REFUSED = 2  # the exit code of a mistake
MAX_PLAN_BYTES = 100_000  # one variable of an environment holds 128 KiB


def start(
    how: Start,
    command: list[str],
    plan: str,
    fidelity: str,
    out: Path | None,
    settings: Settings | None = None,
    shares: str | None = None,
    data: Path | None = None,
) -> int:
    """``settings``: of `paceline train`, whose command they become; ``data``: what --send copies besides."""
    assert how.hosts
    named, way = parse(how.hosts), Way(how.ssh, how.python or sys.executable)
    given_shares = shares or (settings.shares if settings else None)
    nodes, chosen, made = planned(named, plan, command, fidelity, given_shares, how.least)
    if settings and plan != "auto" and not made:
        made = Plan(row(plan), "as asked for")  # what --resume goes on with
    address = how.address if nodes[0] is named[0] else None
    environment = ssh.carried((how.names or "").replace(",", " ").split())
    if shares:
        environment["PACELINE_SHARES"] = shares
    if detach.RUN in os.environ:
        environment[detach.RUN] = os.environ[detach.RUN]
    if settings:
        data = Path(settings.data) if settings.data else None
    home, needs = Path(), needed(command)
    if how.send:
        # what is missing is reported before
        check([dataclasses.replace(node, folder=".") for node in nodes], way, address=address, needs=needs)
        nodes, home, command, data = along(nodes, way, command, data)
    if settings:
        given = dataclasses.replace(settings, data=str(data) if data else None)
        command = ["-m", "paceline.train.run", given.to_json()]
    if out:
        environment["PACELINE_FOLDER"] = str(home / out)  # what is swept there is no place for it
        if made:
            environment["PACELINE_PLAN"] = carried_plan(made)
    paths = ([] if command[0] == "-m" else [command[0]]) + ([str(data)] if data else [])
    quiet = bool(settings and settings.json)
    success = f"run: {home / out} on {nodes[0].name}" if out and not quiet else ""
    launch = Launch(nodes, way, paths, address, needs, how.num_restarts, quiet, success)
    meeting = launch.meet()
    # the hosts may refuse to go on with another run than the one that is there
    waits = settings and out and (out / "settings.json").is_file() and Settings.read(out).fixed != settings.fixed
    if settings and out and not waits:
        _keep(settings, made, out)
    most = int(how.nodes.split(":")[-1]) if how.nodes else 0
    code = launch.start(ssh.Orders(command, chosen, way, environment, how.least, most), meeting)
    if settings and out and waits and code != REFUSED:
        _keep(settings, made, out)
    return code


def _keep(settings: Settings, made: Plan | None, out: Path) -> None:
    """What --resume goes on with."""
    check_free(out)
    settings.write(out)
    if made:
        made.write(out / "plan.toml")
    else:
        (out / "plan.toml").unlink(missing_ok=True)


def carried_plan(made: Plan) -> str:
    """As TOML, without what is too long to be carried."""
    words = made.to_toml()
    if len(words.encode()) <= MAX_PLAN_BYTES:
        return words
    teams = tuple(dataclasses.replace(team, forms="") for team in made.teams)
    return dataclasses.replace(made, pairs=(), teams=teams).to_toml()


def planned(
    named: list[Host], plan: str, command: list[str], fidelity: str, shares: str | None, least: int = 0
) -> tuple[list[Host], list[str], Plan | None]:
    """The hosts to start; each one's row: a plan file's, a row, the kept plan's, or its slots ("" leaves it to the
    node); and the plan, if any. Slots exclude a kept plan; with ``least``, nodes that may fail, all hosts start."""
    asked, own = os.environ.get("PACELINE_ENGINE", "") if plan == "auto" else plan, dict[str, str]()
    made = Plan.read(asked) if asked and Path(asked).is_file() else None
    if plan == "auto" and not asked and not any(node.slots for node in named):
        made = plan_cache.over([node.name for node in named], command, fidelity)
        if made:
            print(f"plan: {made.chosen} ({made.reason}; measured {made.date})", file=sys.stderr)
    nodes = named
    if made:
        asked, own = made.chosen, made.hosts
        nodes = named if least else _used(named, made, shares)
    found = rows(nodes, asked, own)
    for each in filter(None, found):
        row(each)  # raises where it is none
    return nodes, found, made


def _used(named: list[Host], made: Plan, shares: str | None) -> list[Host]:
    """Those that the plan uses; all of them where it uses others, or where --shares are given for each."""
    used = [node for node in named if node.name in made.used]
    if len(used) < max(1, len(made.used)) or isinstance(load_balance.parse_shares(shares or "measured"), tuple):
        return named
    if left := ", ".join(node.name for node in named if node not in used):
        print(
            f"not started: {left}, since the plan uses {len(used)} of {len(named)}; --plan with a row, such as --plan "
            f"{made.chosen}, starts all",
            file=sys.stderr,
        )
    return used


def along(
    nodes: list[Host], way: Way, command: list[str], data: Path | None
) -> tuple[list[Host], Path, list[str], Path | None]:
    """The hosts with their folders, the first one's home, and the script and the data as they are called there."""
    here = Path(way.folder)
    script = None if command[0] == "-m" else Path(os.path.normpath(here / command[0]))
    if script and here not in script.parents:
        raise ValueError(f"--send: {script} is not below {here}, which is sent; start from a folder that holds it")
    trees, place = snapshot.take(here, data)
    if script and script.relative_to(here).as_posix() not in {path for path, *_ in trees[-1].files}:
        raise ValueError(f"--send: {command[0]} is not copied, because git ignores it, or it is a link; fix that")
    if trees[-1].num_bytes > snapshot.LARGE_BYTES:
        largest = max(trees[-1].files, key=lambda file: file[2])
        print(
            f"paceline: the working tree is {trees[-1].num_bytes / 1e6:.0f} MB, its largest file {largest[0]} with "
            f"{largest[2] / 1e6:.0f} MB; have git ignore what is not needed, and give data as --data",
            file=sys.stderr,
        )
    with Console(stderr=True).status("sending") as status:
        nodes, deliveries = deliver(nodes, way, trees, status.update)
    for each in deliveries:
        what = f"{each.files} files, {each.done_bytes / 1e6:.1f} MB, in {each.seconds:.1f} s"
        print(f"sent to {each.host.name}: {what}; {each.there} were there", file=sys.stderr)
    first = script.relative_to(here).as_posix() if script else command[0]
    return nodes, Path(deliveries[0].home), [first, *command[1:]], Path(place) if place else None
