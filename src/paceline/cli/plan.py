"""`paceline plan`: predicts and measures the configurations of a job."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli import options
from paceline.cli.measuring import Measuring
from paceline.cli.options import console, listed
from paceline.cli.prepare import check_alone, check_script, show
from paceline.launch import allocation, ssh
from paceline.launch.ask_hosts import RemoteQuery
from paceline.launch.child_processes import ChildProcesses
from paceline.launch.deploy.packages import needed
from paceline.launch.doctor.preflight import check
from paceline.launch.hosts import Host, Way, parse
from paceline.launch.local import num_processes
from paceline.launch.machine import survey
from paceline.launch.output import shown
from paceline.planner import ddp_script
from paceline.planner import planner as planning
from paceline.planner.plan_tables import method_table, pair_table, team_table
from paceline.planner.planner import Plan
from paceline.planner.teams import WhatIf, describe_factors
from paceline.registry import PROCESSES, REPRODUCIBLE
from paceline.train.settings import Settings

MAX_RANKS = 8  # of a script that says itself how it is divided, where --rows does not ask for more
# options of a plan alone
PLANNED = {"fidelity", REPRODUCIBLE, "budget", "every", "what_if", "nodes", "link", "out"}
MAX_LISTED = 64  # nodes for which --nodes prints one line per number


def plan(
    context: typer.Context,
    script: Annotated[
        str | None, typer.Argument(help="A script with its arguments; or no script, and --model.")
    ] = None,
    model: options.Model = None,
    data: options.Data = None,
    batch_size: Annotated[int | None, typer.Option(help="Global batch size.")] = None,
    fidelity: options.Fidelity = "exact",
    reproducible: options.Reproducible = False,
    budget: Annotated[
        float | None,
        typer.Option(help="Limit in seconds; default 60, or where a step takes over 2 s six steps for each."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Measure all configurations, however long it takes.")] = False,
    rows: Annotated[str | None, typer.Option(help="Only these configurations, separated by spaces or commas.")] = None,
    named: options.Hosts = None,
    what_if: Annotated[
        list[str] | None, typer.Option(help="Prediction only: nodes=8,link=10gbit,latency=5ms; may be repeated.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Without -H: predict up to so many machines like this one.")] = None,
    link: Annotated[str | None, typer.Option(help="Network between --nodes, such as 1gbit.")] = None,
    env: options.Env = None,
    python: options.Python = None,
    address: options.Address = None,
    ssh_command: options.Ssh = "ssh",
    out: Annotated[Path | None, typer.Option(help="TOML file to write the plan to, for train --plan FILE.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Predicts and measures every configuration for a job, on one machine or several, and says why each was rejected.

    Examples:

    paceline plan --model alexnet --batch-size 32 --data ./photos --out plan.toml

    paceline plan --fidelity rounded train.py --my-option 3

    paceline plan -H hostA,hostB --what-if nodes=8,link=10gbit train.py

    paceline plan --nodes 2 --link 1gbit --model alexnet --data ./photos

    paceline plan --rows processes:2 ddp.py

    In a Slurm allocation of several nodes it plans for all of them, and reaches them by srun.
    """
    hosts, ssh_command = _reached(listed(named), ssh_command, bool(every or reproducible or nodes))
    if budget is not None and not budget > 0:
        raise ValueError(f"--budget takes seconds above 0, got {budget:g}; --all measures all configurations")
    if every and (budget or hosts):
        raise ValueError(f"--all has no limit and is for one machine; leave it or {'-H' if hosts else '--budget'} out")
    imagined = _imagined(what_if or [], nodes, link, bool(hosts))
    command = _command(script, context.args, model, data, batch_size)
    if script and (used := ddp_script.used(command)):
        _time_ddp(context, command, used, _words(hosts), ssh_command)
        return
    how: dict[str, Any] = {"fidelity": fidelity, "budget_s": budget, "rows": _words(rows) or None}
    if hosts and reproducible:
        raise ValueError(
            f"--reproducible is planned for one machine: leave out -H, and run with --plan {planning.DETERMINISTIC}"
        )
    if out:
        check_writable(out)
    if hosts:
        check_alone(hosts)
        nodes_of_hosts, way = _hosts(hosts), Way(ssh_command, python or sys.executable)
        ssh.carried(_words(env))
        paths = [script] if script and script != "-m" else [data] if data else []
        check(nodes_of_hosts, way, paths, address, needed(command))
        remote = RemoteQuery(way, env or "", address or "", nodes_of_hosts[0].name)
        made, text = _over(nodes_of_hosts, remote, command, how, imagined)
    else:
        made, text = _here(command, how, imagined, reproducible, every)
    if out:
        made.write(out)
    if as_json:
        print(made.to_json())
        return
    if not hosts:
        show(made)
    _show_nodes(made, text)


def _words(text: str | None) -> list[str]:
    """Separated by spaces or commas; a comma before an option of an engine separates nothing."""
    return [word for word in re.split(r"\s+|,(?!\w+=)", text or "") if word]


def _reached(hosts: str | None, ssh_command: str, of_one_machine: bool) -> tuple[str | None, str]:
    return (hosts, ssh_command) if of_one_machine else allocation.reached(hosts, ssh_command)


def _command(script: str | None, more: list[str], model: str | None, data: str | None, size: int | None) -> list[str]:
    """The command to plan: a script, or `paceline train`. Raises ValueError if options of both are given."""
    if not script:
        return ["-m", "paceline.train.run", Settings(model=model, data=data, batch_size=size).to_json()]
    check_script([script, *more])
    if given := [name for name, value in (("--model", model), ("--data", data), ("--batch-size", size)) if value]:
        raise ValueError(
            f"{', '.join(given)} before the script belongs to `paceline train`, which is planned if no script is "
            f"given; put a script's own options after it, or leave the script out"
        )
    return [script, *more]


def _check_ddp(command: list[str], used: str, context: typer.Context) -> None:
    """Raises ValueError for what needs `join`."""
    options = {each.name: each.opts[0] for each in context.command.params if each.name in PLANNED}
    sources = {option: context.get_parameter_source(name) for name, option in options.items() if name}
    given = [option for option, source in sources.items() if source and source.name == "COMMANDLINE"]
    if given:
        raise ValueError(
            f"{command[0]} uses {used}: its steps are timed with torch's class and with ours, and no plan is made; "
            f"leave {', '.join(given)} out; -H, --rows {PROCESSES}:k and --json are accepted"
        )


def _time_ddp(context: typer.Context, command: list[str], used: str, hosts: list[str], ssh_command: str) -> None:
    """Of a script that divides its own work among processes."""
    _check_ddp(command, used, context)
    env, python, address, rows, as_json = map(context.params.get, ("env", "python", "address", "rows", "as_json"))
    reached = ("--env", env), ("--python", python), ("--address", address), ("--ssh", ssh_command)
    options = [word for name, value in reached if value for word in (name, value)]
    machines, cores = ddp_script.Machines(hosts, options), survey().cores
    ranks = max(map(num_processes, _words(rows))) if rows else min(MAX_RANKS, cores)
    with ChildProcesses(), Measuring(lines=not as_json) as screen:
        found = ddp_script.timings(command, ranks, screen.show, machines)
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found]))
    for text in ddp_script.report(found, cores) if not as_json else ():
        console.print(text, markup=False, highlight=False)
    if all(one.error for one in found):
        raise ValueError(f"{command[0]} could not be timed: {found[0].error}")


def _show_nodes(made: Plan, more: str) -> None:
    """Prints the network between the hosts, the teams, and the answer."""
    wide = console if console.is_terminal else Console(highlight=False, width=200)
    if made.pairs:
        wide.print(pair_table(made.pairs))
    if made.teams:
        wide.print(team_table(made.teams))
        for text in describe_factors(made.teams):
            console.print(shown(text), markup=False, highlight=False)
        if made.methods:
            first = made.methods[0]
            over = f" over {first.link}" if first.link else ""
            batch = f"a global batch of {first.batch_size}"
            wide.print(f"{first.nodes} nodes{over} and {batch} with each exchange and codec, by prediction:")
            wide.print(method_table(made.methods))
        console.print(shown(more), markup=False, highlight=False)


def check_writable(out: Path) -> None:
    """Raises OSError, before minutes of measurement, if the plan cannot be written."""
    if out.is_dir():
        raise OSError(f"the plan cannot be written to {out}, which is a folder; give --out a file, {out / 'plan.toml'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}."):
            pass
    except OSError as error:
        raise OSError(f"the plan cannot be written to {out} ({error.strerror}); give another --out") from None


def _here(
    command: list[str], how: dict[str, Any], what_if: list[WhatIf], reproducible: bool, every: bool
) -> tuple[Plan, str]:
    from paceline.planner import cluster as machines

    budget_s = how["budget_s"]
    with ChildProcesses(), Measuring(lines=True) as screen:
        made = planning.make(
            command,
            **how,
            thorough=every,
            patient=not every,
            reproducible=reproducible,
            show=screen.show,
            tell=screen.tell,
        )
        if not what_if:
            return made, ""
        screen.show("recording a step layer by layer")
        return machines.imagine(made, command, what_if, budget_s)


def _over(
    hosts: list[Host], remote: RemoteQuery, command: list[str], how: dict[str, Any], what_if: list[WhatIf]
) -> tuple[Plan, str]:
    from paceline.planner import cluster as machines

    trial_s = min(machines.TRIAL_S, how["budget_s"] / 4) if how["budget_s"] else machines.TRIAL_S
    with Console(stderr=True).status("measuring") as status:
        show = status.update
        return machines.make_over(hosts, remote, command, **how, what_if=what_if, trial_s=trial_s, show=show)


def _hosts(text: str) -> list[Host]:
    found = parse(text)
    if counted := [host.name for host in found if host.slots]:
        raise ValueError(
            f"plan finds the number of processes of each host itself; leave out the number after the colon of "
            f"{', '.join(counted)}, or give the configurations to try with --rows"
        )
    return found


def _imagined(what_if: list[str], nodes: int | None, link: str | None, over: bool) -> list[WhatIf]:
    """The hypothetical clusters. Raises ValueError before any measurement."""
    if nodes is not None and (over or not 1 < nodes <= MAX_LISTED or not link):
        raise ValueError(
            f"--nodes {nodes} predicts 2 to {MAX_LISTED} machines like this one over --link, such as --nodes 2 "
            f"--link 1gbit; with -H use --what-if nodes={nodes}"
        )
    if link and nodes is None:
        raise ValueError(f"--link {link} is between --nodes, such as --nodes 2 --link {link}; with -H use --what-if")
    found = [WhatIf.parse(f"nodes={count},link={link}") for count in range(2, (nodes or 1) + 1)]
    found += [WhatIf.parse(text) for text in what_if]
    if (adding := os.environ.get("PACELINE_COLLECTIVE")) and any((what.nodes or 2) > MAX_LISTED for what in found):
        raise ValueError(
            f"PACELINE_COLLECTIVE={adding} is simulated message by message, for up to {MAX_LISTED} nodes; give fewer "
            f"nodes in --what-if, or leave it out"
        )
    if not over and any(what.bits_per_s is None for what in found):
        raise ValueError(
            "a prediction for other machines needs the link between them, and without -H there is none to measure; "
            "add its rate to --what-if, as in nodes=2,link=1gbit"
        )
    return found
