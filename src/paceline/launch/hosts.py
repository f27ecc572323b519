"""Parses the hosts of -H, such as `hostA,user@hostB:2`, reports every error in them, and builds ssh's command line."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.launch.local import num_processes
from paceline.registry import PROCESSES, head, says

COUNTED = "thread", "copy"  # a host's slots are as many of these
MAX_SLOTS = 1024  # what is more is a port
USER = re.compile(r"[A-Za-z0-9_][^\s@:,\[\]]*")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# the user's own options stand before these and win; nobody is asked anything, and a dead connection ends in 15 s
OPTIONS = (
    *("-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes"),
    *("-o", "RemoteCommand=none"),
)
# a file of the user's, in the folder in which ssh begins, may be named as one of Python's
OWN_PATH = "import sys; sys.path[:] = [folder for folder in sys.path if folder]"
# in one line, since not every shell can quote several; what it reads may be any Python's, also one that is too old
READ = f"{OWN_PATH}; source = getattr(sys.stdin, 'buffer', sys.stdin); exec(source.read(int(source.readline())))"
TOO_OLD = 'if sys.version_info < (3, 10):\n    sys.exit("Python %d.%d" % sys.version_info[:2])\n'


def program(text: bytes) -> bytes:
    """As what runs READ takes it from stdin; a command line has room for little."""
    return b"%d\n%s" % (len(text), text)


@dataclass(frozen=True)
class Host:
    """``name`` is for messages and output, ``target`` for ssh, ``slots`` the number of processes, if given.

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
            raise ValueError(f"--ssh {self.ssh!r} cannot be split into arguments: {error}") from None
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
    for word in map(str.strip, text.split(",")):
        user, at, place = word.rpartition("@")
        name, count = _apart(place)
        if not (NAME.fullmatch(name) or _is_ipv6(name)) or (at and not USER.fullmatch(user)):
            faults.append(f"{word!r} is no host name")
        elif count is not None and not (count.isdecimal() and 0 < int(count) <= MAX_SLOTS):
            faults.append(
                f"{word!r} asks for {count!r} processes; a whole number from 1 to {MAX_SLOTS} stands after the colon, "
                f"and a port in ~/.ssh/config"
            )
        elif name in [host.name for host in hosts]:
            as_given = f"[{name}]" if ":" in name else name
            faults.append(f"{name} is named twice; a host with two processes is {as_given}:2")
        else:
            hosts.append(Host(name, f"{user}{at}{name}", int(count) if count else None))
    if faults:
        raise ValueError(
            f"-H {text}: {'; '.join(faults)}; accepted: hosts as ssh knows them, separated by commas, as in "
            f"hostA,user@hostB, or with a number of processes on each, as in hostA:4,hostB:2; an IPv6 address with a "
            f"number is [fd00::1]:4"
        )
    return hosts


def _apart(place: str) -> tuple[str, str | None]:
    """A host and what follows its colon; None without one."""
    if bracketed := re.fullmatch(r"\[([^\]]*)\](?::(.*))?", place):
        return (bracketed[1] if _is_ipv6(bracketed[1]) else place), bracketed[2]
    name, colon, count = place.partition(":")
    return (name, count if colon else None) if place.count(":") < 2 else (place, None)


def _is_ipv6(name: str) -> bool:
    address, percent, scope = name.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or bool(NAME.fullmatch(scope))


def rows(hosts: Sequence[Host], asked: str, own: Mapping[str, str] | None = None) -> list[str]:
    """The row of each node: its own by its host's name, or the one asked for; "" leaves it to the node.

    A host's slots are what its engine counts: threads and processes:2 become threads:4 and processes:2 on hostA:4 and
    hostB:2; where nothing is asked for, they are processes. Raises ValueError where the two contradict each other.
    """
    own = own or {}
    faults, names = [], {host.name for host in hosts}
    if (unknown := sorted(own.keys() - names)) and not names <= own.keys():
        known = ", ".join(host.name for host in hosts)
        faults.append(f"the plan has rows for {', '.join(unknown)}, and -H names {known}; name these, or fix the plan")
    found = []
    for host in hosts:
        row = own.get(host.name, asked)
        engine, plus, numerics = row.partition("+")
        name, count = head(row)
        if not row:
            row = f"{PROCESSES}:{host.slots}" if (host.slots or 1) > 1 else ""
        elif host.slots is not None and says("engine", name, "counts") in COUNTED and engine == name:
            row = f"{name}:{host.slots}{plus}{numerics}"
        elif host.slots not in (None, num_processes(row)) and count != str(host.slots):
            faults.append(f"-H asks for {host.slots} on {host.name}, the row {row!r} for another number; leave one out")
        found.append(row)
    if faults:
        raise ValueError("; ".join(faults))
    return found
