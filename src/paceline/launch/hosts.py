"""Parses the hosts of -H, such as `hostA,user@hostB:2`, and reports all errors in them; starts Python on a host."""

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

COUNTED = "thread", "copy"  # units of an engine's count that a host's slots set
MAX_SLOTS = 1024  # a larger number is taken for a port
USER = re.compile(r"[A-Za-z0-9_][^\s@:,\[\]]*")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# the user's options precede these and override them; ssh never prompts, and a dead connection ends within 15 s
OPTIONS = (
    *("-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes"),
    *("-o", "RemoteCommand=none"),
)
SRUN = "srun"  # in the place of ssh: for the nodes of a Slurm allocation
# beside the steps that run, with all processors of the node
SRUN_OPTIONS = (
    *("--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--mem=0", "--quiet", "--kill-on-bad-exit=0"),
    "--mpi=none",
)
# a file in the user's home folder may have the name of a standard module
OWN_PATH = "import sys; sys.path[:] = [folder for folder in sys.path if folder]"
# in one line, since not every shell can quote several; it runs on Pythons that are too old, too
READ = f"{OWN_PATH}; source = getattr(sys.stdin, 'buffer', sys.stdin); exec(source.read(int(source.readline())))"
TOO_OLD = 'if sys.version_info < (3, 10):\n    sys.exit("Python %d.%d" % sys.version_info[:2])\n'


def program(text: bytes) -> bytes:
    """The program as READ expects it on stdin; command lines are limited in length."""
    return b"%d\n%s" % (len(text), text)


@dataclass(frozen=True)
class Host:
    """``name``: for messages and output; ``target``: for ssh; ``slots``: the number of processes, if given.

    ``folder``: the run's working directory there; None: the same path as here.
    """

    name: str
    target: str
    slots: int | None = None
    folder: str | None = None


@dataclass(frozen=True)
class Way:
    """How to run Python on hosts: the command line of ssh, or of srun, the interpreter, the working directory there."""

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

    @property
    def in_slurm(self) -> bool:
        return os.path.basename(shlex.split(self.ssh)[0]) == SRUN

    def command(self, host: Host, *arguments: str) -> list[str]:
        """The command that starts Python on a host. The arguments must hold no secret: every user there sees them."""
        given = shlex.split(self.ssh)
        if self.in_slurm:
            return [*given, *SRUN_OPTIONS, f"--nodelist={host.name}", self.python, *arguments]
        return [*given, *OPTIONS, host.target, f"exec {shlex.join([self.python, *arguments])}"]

    def at(self, host: Host) -> Way:
        """The same, with the working directory of this host."""
        return dataclasses.replace(self, folder=host.folder or self.folder)


def parse(text: str) -> list[Host]:
    """Parses -H. Raises ValueError that names every error."""
    hosts: list[Host] = []
    faults = []
    for word in map(str.strip, text.split(",")):
        user, at, host_text = word.rpartition("@")
        name, count = _apart(host_text)
        if not (NAME.fullmatch(name) or _is_ipv6(name)) or (at and not USER.fullmatch(user)):
            faults.append(f"{word!r} is no host name")
        elif count is not None and not (count.isdecimal() and 0 < int(count) <= MAX_SLOTS):
            faults.append(
                f"{word!r} asks for {count!r} processes; give a whole number from 1 to {MAX_SLOTS} after the colon, "
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


def _apart(host_text: str) -> tuple[str, str | None]:
    """A host and the text after its colon; None without a colon."""
    if bracketed := re.fullmatch(r"\[([^\]]*)\](?::(.*))?", host_text):
        return (bracketed[1] if _is_ipv6(bracketed[1]) else host_text), bracketed[2]
    name, colon, count = host_text.partition(":")
    return (name, count if colon else None) if host_text.count(":") < 2 else (host_text, None)


def _is_ipv6(name: str) -> bool:
    address, percent, scope = name.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or bool(NAME.fullmatch(scope))


def configurations(hosts: Sequence[Host], requested: str, planned: Mapping[str, str] | None = None) -> list[str]:
    """Each node's configuration: the ``planned`` one of its host, or the ``requested`` one; "": the node's default.

    A host's slots set the engine's count: ``threads`` becomes threads:4 on hostA:4 and threads:2 on hostB:2; without a
    configuration they are processes. Raises ValueError if slots and configuration contradict each other.
    """
    planned = planned or {}
    faults, names = [], {host.name for host in hosts}
    if (unknown := sorted(planned.keys() - names)) and not names <= planned.keys():
        known = ", ".join(host.name for host in hosts)
        faults.append(f"the plan is for {', '.join(unknown)}, and -H names {known}; name these, or fix the plan")
    found = []
    for host in hosts:
        engine = planned.get(host.name, requested)
        base, plus, numerics = engine.partition("+")
        outer, slash, inner = base.partition("/")
        name, count = head(engine)
        if not engine:
            engine = f"{PROCESSES}:{host.slots}" if (host.slots or 1) > 1 else ""
        elif host.slots is not None and says("engine", name, "counts") in COUNTED and outer == name:
            engine = f"{name}:{host.slots}{slash}{inner}{plus}{numerics}"
        elif host.slots not in (None, num_processes(engine)) and count != str(host.slots):
            faults.append(f"-H asks for {host.slots} on {host.name}, {engine!r} for another number; leave one out")
        found.append(engine)
    if faults:
        raise ValueError("; ".join(faults))
    return found
