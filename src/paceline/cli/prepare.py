"""What train, run and plan share: a plan at hand or made, and the start."""

from __future__ import annotations

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
from paceline.checkpoint.run_lock import free
from paceline.cli.attach import follow
from paceline.cli.options import console
from paceline.data import load_balance
from paceline.environment import wait_s
from paceline.launch import detach, local, ssh
from paceline.launch.child_processes import ChildProcesses
from paceline.launch.deploy import snapshot
from paceline.launch.deploy.packages import needed
from paceline.launch.deploy.send import send as deliver
from paceline.launch.doctor.preflight import check
from paceline.launch.hosts import Host, Way, parse, rows
from paceline.launch.machine import survey
from paceline.launch.supervise import trained_alone
from paceline.launch.supervise.node_restarts import RETURNS
from paceline.launch.supervise.restart_policy import RESTARTS
from paceline.launch.supervise.takeover import Launch
from paceline.link.net.ticket import JoinTicket
from paceline.link.net.tls_mesh import check as check_encryption
from paceline.planner import plan_cache
from paceline.planner import planner as planning
from paceline.planner.candidates import ROUNDED, split
from paceline.planner.plan_tables import plan_table
from paceline.planner.planner import Plan
from paceline.train.settings import Settings

REFUSED = 2  # the exit code of a mistake
MAX_PLAN_BYTES = 100_000  # one variable of an environment holds 128 KiB


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
    if _is_plain(text):
        return text
    from paceline.engine.compute.precision import parse_row

    engine, _ = parse_row(text)
    registry.parse("engine", engine)
    return text


def _is_plain(row: str) -> bool:
    """Whether it is surely a row, as can be told without importing torch, which takes seconds."""
    try:
        way = split(row, 1)
    except ValueError:
        return False
    return way.engine in registry.names("engine") and len({*ROUNDED} & {*way.words}) < 2


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
        free(out)
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


def start_over_ssh(
    how: Start,
    command: list[str],
    plan: str,
    fidelity: str,
    out: Path | None,
    settings: Settings | None = None,
    shares: str | None = None,
    data: Path | None = None,
) -> int:
    """``settings``: of `paceline train`, whose command they become; ``data``: what a script's run sends besides."""
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
        # what is missing is told before
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
    free(out)
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
    """The hosts to start, and each one's row: a plan file's, a row, the kept plan's, or its slots; "" leaves it to the
    node; and the plan, if it is one's. Who says slots has decided without a kept plan, and who says how many nodes may
    be lost (``least``) wants all of them."""
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
        row(each)
    return nodes, found, made


def _used(named: list[Host], made: Plan, shares: str | None) -> list[Host]:
    """Those that the plan uses; all of them where it uses others, or where each was given its share."""
    used = [node for node in named if node.name in made.used]
    if len(used) < max(1, len(made.used)) or isinstance(load_balance.wanted(shares or "measured"), tuple):
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
        raise ValueError(f"--send: {command[0]} does not go along, because git ignores it, or it is a link; mend that")
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


def leave(words: list[str], hosts: str | None) -> None:
    """With --detach: goes on in the launcher started so; whoever started that follows until it has begun, and exits."""
    if run := detach.leave(words, hosts):
        follow(run, until_begun=True)


def check_alone(hosts: str | None, send: bool = False, data: str | None = None, detached: bool = False) -> None:
    """Raises ValueError for options that need each other, or that nobody needs."""
    if "RANK" in os.environ and (hosts or detached):
        raise ValueError(
            f"{'-H' if hosts else '--detach'} starts every node from one process, and a launcher started this one as "
            f"one of several (RANK={os.environ['RANK']}); leave it out, or that launcher, or unset RANK"
        )
    if send and not hosts:
        raise ValueError("--send sends to the hosts of -H, and there is none; leave it out, or give -H")
    if data and not send:
        raise ValueError(
            f"--data {data} goes along with --send alone; give --send, or leave it to the script's own words"
        )


def check_first() -> None:
    """Raises ValueError where a launcher has started this as one of several: each would start a run of its own."""
    if int(size if (size := os.environ.get("WORLD_SIZE", "1")).isdigit() else 1) > 1:
        raise ValueError(
            f"`paceline run` starts all processes of a run by itself, and a launcher has started this one as one of "
            f"{size} (WORLD_SIZE); give that launcher the script: python SCRIPT, or leave the launcher out, or unset "
            f"WORLD_SIZE"
        )


def waits(seconds: float | None) -> None:
    """With --wait: so long does whatever is started from here on wait for nodes that failed. Raises ValueError."""
    if seconds is not None:
        os.environ["PACELINE_WAIT"] = f"{seconds:g}"
    wait_s()


def hide(asked: bool) -> None:
    """With --encrypt: whatever is started from here on encrypts. Raises ValueError where it cannot."""
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
    """What goes into the environment of a node that comes late. Raises ValueError."""
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
