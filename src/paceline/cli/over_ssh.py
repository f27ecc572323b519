"""Launches a run on hosts over ssh: chooses each host's configuration, copies the working tree, starts the nodes."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from rich.console import Console

from paceline.checkpoint.run_lock import check_free
from paceline.cli.prepare import Start, check_configuration
from paceline.data import load_balance
from paceline.launch import detach, ssh
from paceline.launch.deploy import snapshot
from paceline.launch.deploy.packages import needed
from paceline.launch.deploy.send import send as deliver
from paceline.launch.doctor.preflight import check
from paceline.launch.hosts import Host, Way, configurations, parse
from paceline.launch.supervise.takeover import Launch
from paceline.planner import plan_cache
from paceline.planner.planner import Plan
from paceline.train.settings import Settings

REFUSED = 2  # the exit code of a user error
MAX_PLAN_BYTES = 100_000  # an environment variable holds at most 128 KiB


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
    """Runs on hosts; returns the exit code. ``settings``: of `paceline train`; ``data``: a folder to copy by --send."""
    assert how.hosts
    hosts, way = parse(how.hosts), Way(how.ssh, how.python or sys.executable)
    given_shares = shares or (settings.shares if settings else None)
    nodes, chosen, made = planned(hosts, plan, command, fidelity, given_shares, how.min_nodes)
    if settings and plan != "auto" and not made:
        made = Plan(check_configuration(plan), "as requested")  # for --resume
    address = how.address if nodes[0] is hosts[0] else None
    environment = ssh.carried((how.names or "").replace(",", " ").split())
    if shares:
        environment["PACELINE_SHARES"] = shares
    if detach.RUN in os.environ:
        environment[detach.RUN] = os.environ[detach.RUN]
    if settings:
        data = Path(settings.data) if settings.data else None
    home, needs = Path(), needed(command)
    if how.send:
        # reports missing packages and tools before the files are sent
        check([dataclasses.replace(node, folder=".") for node in nodes], way, address=address, needs=needs)
        nodes, home, command, data = send_tree(nodes, way, command, data)
    if settings:
        given = dataclasses.replace(settings, data=str(data) if data else None)
        command = ["-m", "paceline.train.run", given.to_json()]
    if out:
        environment["PACELINE_FOLDER"] = str(home / out)  # in the home folder, since --send's own folder is cleaned up
        if made:
            environment["PACELINE_PLAN"] = carried_plan(made)
    paths = ([] if command[0] == "-m" else [command[0]]) + ([str(data)] if data else [])
    quiet = bool(settings and settings.json)
    success = f"run: {home / out} on {nodes[0].name}" if out and not quiet else ""
    launch = Launch(nodes, way, paths, address, needs, how.num_restarts, quiet, success)
    rendezvous = launch.check_hosts()
    # the hosts may refuse to resume a run with other settings than the saved ones
    saves_later = settings and out and (out / "settings.json").is_file() and Settings.read(out).fixed != settings.fixed
    if settings and out and not saves_later:
        _save_settings(settings, made, out)
    max_nodes = int(how.nodes.split(":")[-1]) if how.nodes else 0
    code = launch.start(ssh.Orders(command, chosen, way, environment, how.min_nodes, max_nodes), rendezvous)
    if settings and out and saves_later and code != REFUSED:
        _save_settings(settings, made, out)
    return code


def _save_settings(settings: Settings, made: Plan | None, out: Path) -> None:
    """Saves what --resume needs."""
    check_free(out)
    settings.write(out)
    if made:
        made.write(out / "plan.toml")
    else:
        (out / "plan.toml").unlink(missing_ok=True)


def carried_plan(made: Plan) -> str:
    """The plan as TOML, without its details if they are too long for an environment variable."""
    text = made.to_toml()
    if len(text.encode()) <= MAX_PLAN_BYTES:
        return text
    teams = tuple(dataclasses.replace(team, forms="") for team in made.teams)
    return dataclasses.replace(made, pairs=(), methods=(), teams=teams).to_toml()


def planned(
    hosts: list[Host], plan: str, command: list[str], fidelity: str, shares: str | None, min_nodes: int = 0
) -> tuple[list[Host], list[str], Plan | None]:
    """(hosts to start, their configurations, the plan or None). A configuration is from a plan file, --plan, the cached
    plan or the host's slots, which exclude the cache; "" leaves it to the node. With ``min_nodes`` all hosts start."""
    requested, own = os.environ.get("PACELINE_ENGINE", "") if plan == "auto" else plan, dict[str, str]()
    made = Plan.read(requested) if requested and Path(requested).is_file() else None
    if plan == "auto" and not requested and not any(node.slots for node in hosts):
        made = plan_cache.cached_over([node.name for node in hosts], command, fidelity)
        if made:
            print(f"plan: {made.chosen} ({made.reason}; measured {made.date})", file=sys.stderr)
    nodes = hosts
    if made:
        requested, own = made.chosen, made.hosts
        nodes = hosts if min_nodes else _used(hosts, made, shares)
    found = configurations(nodes, requested, own)
    for each in filter(None, found):
        check_configuration(each)  # raises ValueError
    return nodes, found, made


def _used(hosts: list[Host], made: Plan, shares: str | None) -> list[Host]:
    """The hosts that the plan uses; all hosts if it uses others, or if --shares lists a share per host."""
    used = [node for node in hosts if node.name in made.used]
    if len(used) < max(1, len(made.used)) or isinstance(load_balance.parse_shares(shares or "measured"), tuple):
        return hosts
    if unused := ", ".join(node.name for node in hosts if node not in used):
        print(
            f"not started: {unused}, since the plan uses {len(used)} of {len(hosts)}; --plan with a configuration, "
            f"such as --plan {made.chosen}, starts all",
            file=sys.stderr,
        )
    return used


def send_tree(
    nodes: list[Host], way: Way, command: list[str], data: Path | None
) -> tuple[list[Host], Path, list[str], Path | None]:
    """Copies the tree: (hosts with folders, home of the first host, command and data with their paths there)."""
    working_dir = Path(way.folder)
    script = None if command[0] == "-m" else Path(os.path.normpath(working_dir / command[0]))
    if script and working_dir not in script.parents:
        raise ValueError(f"--send: {script} is not below the sent {working_dir}; start from a folder that holds it")
    trees, data_there = snapshot.take(working_dir, data)
    if script and script.relative_to(working_dir).as_posix() not in {path for path, *_ in trees[-1].files}:
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
        what = f"{each.num_files} files, {each.done_bytes / 1e6:.1f} MB, in {each.seconds:.1f} s"
        print(f"sent to {each.host.name}: {what}; {each.num_present} were already there", file=sys.stderr)
    first = script.relative_to(working_dir).as_posix() if script else command[0]
    return nodes, Path(deliveries[0].home), [first, *command[1:]], Path(data_there) if data_there else None
