"""Which hosts, and how they are reached: `hostA,user@hostB:2` becomes a list, and every fault in it is told."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.launch.local import num_processes

NAME = re.compile(r"(?:[A-Za-z0-9_][^\s@:,]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
# the user's own options stand before these and win; nobody is asked anything, and a dead connection ends in 15 s
OPTIONS = (
    *("-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=6", "-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes"),
    *("-o", "RemoteCommand=none"),
)


@dataclass(frozen=True)
class Host:
    """``name`` is what messages and output say, ``target`` what ssh is given, ``slots`` how many processes, if said."""

    name: str
    target: str
    slots: int | None = None


@dataclass(frozen=True)
class Way:
    """How hosts are reached, and what is used there: ssh's command line, the interpreter, the working directory."""

    ssh: str = "ssh"
    python: str = sys.executable
    folder: str = field(default_factory=os.getcwd)

    def __post_init__(self) -> None:
        try:
            given = shlex.split(self.ssh)
        except ValueError as error:
            raise ValueError(f"--ssh {self.ssh!r} cannot be taken apart into words: {error}") from None
        if not given:
            raise ValueError("--ssh needs a command, as in 'ssh -F file', and is empty; leave it out for plain ssh")

    def command(self, host: Host, *words: str) -> list[str]:
        """What starts Python with ``words`` on a host. Nothing secret may be among them: anybody there sees them."""
        return [*shlex.split(self.ssh), *OPTIONS, host.target, f"exec {shlex.join([self.python, *words])}"]


def parse(text: str) -> list[Host]:
    """Raises ValueError that names every fault."""
    hosts: list[Host] = []
    faults = []
    for word in text.split(","):
        target, colon, count = word.strip().partition(":")
        name = target.rpartition("@")[2]
        if word.count(":") > 1:
            faults.append(f"{word!r} is an IPv6 address, or two hosts; give it a name in ~/.ssh/config, and use that")
        elif not NAME.fullmatch(target):
            faults.append(f"{word!r} is no host name")
        elif colon and not (count.isdigit() and int(count) > 0):
            faults.append(f"{word!r} asks for {count!r} processes; a whole number from 1 stands after the colon")
        elif name in [host.name for host in hosts]:
            faults.append(f"{name} is named twice; a host with two processes is {name}:2")
        else:
            hosts.append(Host(name, target, int(count) if colon else None))
    if faults:
        raise ValueError(
            f"-H {text}: {'; '.join(faults)}; accepted: hosts as ssh knows them, separated by commas, as in "
            f"hostA,user@hostB, or with the same number of processes on each, as in hostA:2,hostB:2"
        )
    return hosts


def row(hosts: Sequence[Host], asked: str) -> str:
    """The row for every node: the one asked for ("" where none was), or as many processes as there are slots.

    Raises ValueError where the two contradict each other, or hosts differ in their slots.
    """
    slots = {host.slots or 1 for host in hosts}
    if len(slots) > 1:
        given = ", ".join(f"{host.name}:{host.slots or 1}" for host in hosts)
        raise ValueError(
            f"-H {given}: every node needs the same number of processes; give each the same, or none, and let threads "
            f"use the cores of each"
        )
    (count,) = slots
    if not asked:
        return f"processes:{count}" if count > 1 else ""
    if hosts[0].slots is not None and num_processes(asked) != count:
        raise ValueError(
            f"-H asks for {count} processes per node, the row {asked!r} for {num_processes(asked)}; "
            f"leave one of them out"
        )
    return asked
