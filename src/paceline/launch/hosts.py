"""Which hosts, and how they are reached: `hostA,user@hostB:2` becomes a list, and every fault in it is told."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.launch.local import num_processes

COUNTING = "processes", "threads", "replicas"  # engines that say how many
NAME = re.compile(r"(?:[A-Za-z0-9_][^\s@:,]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
# the user's own options stand before these and win; nobody is asked anything, and a dead connection ends in 15 s
OPTIONS = (
    *("-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=6", "-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes"),
    *("-o", "RemoteCommand=none"),
)


@dataclass(frozen=True)
class Host:
    """``name`` is what messages and output say, ``target`` what ssh is given, ``slots`` how many processes, if said.

    ``folder``: where the run starts there, if not in the same folder as here.
    """

    name: str
    target: str
    slots: int | None = None
    folder: str | None = None


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

    def at(self, host: Host) -> Way:
        """With the folder there."""
        return dataclasses.replace(self, folder=host.folder or self.folder)


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
            f"hostA,user@hostB, or with a number of processes on each, as in hostA:4,hostB:2"
        )
    return hosts


def rows(hosts: Sequence[Host], asked: str, own: Mapping[str, str] | None = None) -> list[str]:
    """The row of each node: its own by its host's name, or the one asked for; "" leaves it to the node.

    A host's slots are what its engine counts: threads and processes:2 become threads:4 and processes:2 on hostA:4 and
    hostB:2; where nothing is asked for, they are processes. Raises ValueError where the two contradict each other.
    """
    own = own or {}
    faults = []
    if strange := sorted(own.keys() - {host.name for host in hosts}):
        known = ", ".join(host.name for host in hosts)
        faults.append(f"the plan has rows for {', '.join(strange)}, and -H names {known}; name these, or mend the plan")
    found = []
    for host in hosts:
        row = own.get(host.name, asked)
        engine, plus, numerics = row.partition("+")
        name, colon, count = engine.partition(":")
        if not row:
            row = f"processes:{host.slots}" if (host.slots or 1) > 1 else ""
        elif host.slots is not None and name in COUNTING and not colon:
            row = f"{name}:{host.slots}{plus}{numerics}"
        elif host.slots not in (None, num_processes(row)) and count.partition("/")[0] != str(host.slots):
            faults.append(f"-H asks for {host.slots} on {host.name}, the row {row!r} for another number; leave one out")
        found.append(row)
    if faults:
        raise ValueError("; ".join(faults))
    return found
