"""Status server: each process of a run reports its current activity on a socket of its machine.

A Linux abstract socket leaves no file behind. The server answers only processes of the same user and of root. A client
that is not root queries only servers of its own user.

    client -> server: one JSON object in a line      server -> client: one JSON object, then the connection is closed
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.environment import LaunchEnvironment
from paceline.report.activity import Activity

if TYPE_CHECKING:
    from paceline.transport import Membership

PREFIX = "paceline-live-"
TIMEOUT_S, STACKS_TIMEOUT_S = 3.0, 1.0
MAX_BYTES = 1 << 12  # of a request

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class StatusServer:
    """Serves requests from a thread of its own until `close`."""

    def __init__(self, handler: Handler):
        self._handler = handler
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(f"\0{PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        self._server.listen()
        threading.Thread(target=self._run, name="paceline live", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(Exception):  # an invalid request must not stop the server
                connection.settimeout(TIMEOUT_S)
                if _user(connection) in (0, os.getuid()):
                    request = json.loads(connection.makefile("rb").readline(MAX_BYTES))
                    connection.sendall(json.dumps(self._handler(request)).encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends `accept` in the thread
        self._server.close()


class Run(Protocol):
    """The parts of `step.run_state.RunState` that `status` reads."""

    world: LaunchEnvironment
    folder: Path | None
    activity: Activity

    @property
    def members(self) -> Membership: ...

    identity: str


def status(run: Run, request: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to a request; with ``stacks``, a list of ranks, also the stacks of this process and of those ranks."""
    world, own = run.world, run.activity.status()
    statuses = run.members.peer_status() or {world.node: own}
    reply = {
        "run": os.environ.get("PACELINE_RUN", ""),
        "folder": str(run.folder.absolute().resolve()) if run.folder else "",
        "command": sys.argv,
        "pid": os.getpid(),
        "node": world.node,
        "num_nodes": world.num_nodes,
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "mine": own,
        "everyone": statuses,
    }
    if (ranks := request.get("stacks")) is not None:
        others = {rank: run.members.peer_stack(rank) for rank in statuses if rank in ranks}
        reply["stacks"] = {
            run.identity: run.activity.stack(),
            **{f"rank {rank} on {statuses[rank]['host']}": stack for rank, stack in others.items()},
        }
    return reply


def names() -> list[str]:
    """The names of all status servers on this machine."""
    listed = Path("/proc/net/unix").read_bytes().decode(errors="replace")  # other programs' names may be any bytes
    return sorted(set(re.findall(rf"@({PREFIX}\d+-\S+)", listed)))


def query(name: str, timeout_s: float = TIMEOUT_S, **request: Any) -> dict[str, Any] | None:
    """The server's reply; None where it does not reply in time, or belongs to another user."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{name}")
        if os.getuid() and _user(connection) != os.getuid():
            return None
        connection.sendall(json.dumps(request).encode() + b"\n")
        reply = json.loads(connection.makefile("rb").read())
        return reply if isinstance(reply, dict) else None
    return None


def state(name: str) -> str:
    """The pid, kernel state and command of a process that does not reply; '' where they are unknown."""
    pid = name.removeprefix(PREFIX).partition("-")[0]
    with contextlib.suppress(OSError, ValueError):
        process = Path("/proc") / pid
        if os.getuid() in (0, process.stat().st_uid):
            found = re.search(r"^State:\s*\S+ \((.+)\)", (process / "status").read_text(), re.MULTILINE)
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            return f"pid {pid}, {found[1] if found else 'gone'}: {command}"
    return ""


def stacks(pids: Collection[int]) -> str:
    """The stacks of these processes of this machine, as far as they reply within STACKS_TIMEOUT_S."""
    end, found = time.monotonic() + STACKS_TIMEOUT_S, ""
    with contextlib.suppress(Exception):  # the caller trains: an invalid name or reply must not end it
        for name in names():
            if time.monotonic() < end and int(name.removeprefix(PREFIX).partition("-")[0]) in pids:
                reply = query(name, max(0.1, end - time.monotonic()), stacks=[])
                for process, stack in (reply or {}).get("stacks", {}).items():
                    found += f"{process}:\n{stack}"
    return found


def _user(connection: socket.socket) -> int:
    """The user id of the peer."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
