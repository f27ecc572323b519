"""`paceline doctor`: diagnoses hosts, the network between them, or a run."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli import options
from paceline.cli.options import console, listed
from paceline.launch.doctor import live_status
from paceline.launch.doctor.examine import Examination, examine
from paceline.launch.doctor.findings import IN_THE_WAY, NOTED, SLOW
from paceline.launch.hosts import Way, parse
from paceline.launch.output import shown

TITLES = {IN_THE_WAY: "problems that prevent a run:", SLOW: "problems that slow a run or risk it:", NOTED: "notes:"}


def doctor(
    named: options.Hosts = None,
    python: options.Python = None,
    address: options.Address = None,
    port: Annotated[
        int, typer.Option(envvar="MASTER_PORT", help="Port that must be free on the first host; 0: any.")
    ] = 0,
    ssh_command: options.Ssh = "ssh",
    run: Annotated[
        str | None, typer.Option(help="A run that trains here: its folder, or the id of a detached run.")
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="With --run: the stack trace of each process.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Finds problems of these hosts and the network between them, or of this machine, and says how to fix them.

    With --run: what each node of a run is doing at present, for how long, and which process it waits for.

    Exit code 0 if no problem prevents a run, else 1.

    Examples:

    paceline doctor

    paceline doctor -H hostA,hostB

    paceline doctor --run runs/mine --stacks
    """
    if run is not None:
        answers = live_status.query(run, stacks)
        print(json.dumps(answers, indent=2) if as_json else "\n".join(map(shown, live_status.lines(answers))))
        return
    if stacks:
        raise ValueError("--stacks are those of a run; give --run with its folder or its id")
    if not 0 <= port < 65536:
        raise ValueError(f"--port takes a number from 1 to 65535, or 0 for any, got {port}")
    hosts = listed(named)
    nodes = parse(hosts) if hosts else None
    with Console(stderr=True).status("querying") as status:
        found = examine(nodes, Way(ssh_command, python or sys.executable), address or "", port, status.update)
    if as_json:
        print(json.dumps(found.plain(), indent=2))
    else:
        console.print("\n".join(map(shown, lines(found))), markup=False)
    raise typer.Exit(0 if found.ready else 1)


def lines(found: Examination) -> list[str]:
    """The findings, the worst first; then a line per host and per direction between two hosts."""
    text = []
    for weight, title in TITLES.items():
        some = [finding for finding in found.findings if finding.weight == weight]
        text += [title, *(f"- {finding}" for finding in some), ""] if some else []
    text += [f"{name}: {_host(facts)}" for name, facts in found.hosts.items() if "fault" not in facts]
    for pair in found.pairs:
        if "latency_s" in pair:
            rate = _rate(pair["bytes_per_s"]) if "bytes_per_s" in pair else "stalled"
            text.append(f"{pair['from']} -> {pair['to']}: {pair['latency_s'] * 1e3:.2f} ms, {rate}")
    count = sum(finding.weight == IN_THE_WAY for finding in found.findings)
    problems = f"{count} problems prevent" if count > 1 else "one problem prevents" if count else "no problem prevents"
    return [*text, f"{problems} a run"]


def _host(facts: Any) -> str:
    software, versions = facts.get("software", {}), facts["versions"]
    parts = [f"Python {facts['python']}", *(f"{name} {version}" for name, version in versions.items() if version)]
    parts += [software["blas"]] if software.get("blas") and not software.get("mkl") else []
    parts += [f"{name} {software[key]}" for name, key in (("MKL", "mkl"), ("oneDNN", "onednn")) if software.get(key)]
    of = f" of {facts['cores_of_machine']}" if facts["cores"] < facts["cores_of_machine"] else ""
    parts.append(f"{facts['cores']} cores{of} {software.get('instructions', '')}".strip())
    parts.append(f"{_gib(facts['free_memory_bytes'])} of {_gib(facts['memory_bytes'])} free")
    parts += [f"/dev/shm {_gib(facts['shared_bytes'])}"] if facts["shared_bytes"] is not None else []
    parts += [f"disk {_gib(facts['disk_bytes'])} free"] if facts["disk_bytes"] is not None else []
    parts += [f"{gpu['name']} ({_gib(gpu['memory_bytes'])})" for gpu in software.get("gpus", [])]
    parts += [f"NVIDIA driver {facts['driver']}"] if facts["driver"] else []
    address = facts.get("place", {}).get("address", "")
    for name, card in facts["cards"].items():
        if address and address.partition("%")[0] in card["addresses"]:
            speed = f", {card['speed_mbit']} Mbit/s" if card["speed_mbit"] else ""
            parts.append(f"{name} {address} (MTU {card['mtu']}{speed})")
    if facts.get("skew_error_s") and facts["address"]:
        parts.append(f"clock {facts['skew_s'] * 1e3:+.1f} ms ± {facts['skew_error_s'] * 1e3:.1f}")
    low, high = facts["ports"]
    parts.append(f"{facts['free_ports']} of the ports {low} to {high} free")
    limit = "no limit" if facts["open_files"] < 0 else facts["open_files"]
    locked = "no limit" if facts["locked_bytes"] < 0 else f"{facts['locked_bytes'] >> 10} KiB"
    return ", ".join([*parts, f"ulimit -n {limit}, -l {locked}"])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _rate(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
