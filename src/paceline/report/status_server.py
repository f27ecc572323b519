"""Status server: each process of a run answers on a socket of its machine what it is doing now.

A Linux abstract socket leaves nothing behind. Nobody is answered but processes of the same user, and of root, and
nobody else is asked.

    who asks -> process: one JSON object in a line      process -> who asks: one JSON object, and the end
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
LIMIT_S, SOON_S = 3.0, 1.0
MAX_BYTES = 1 << 12  # of a question

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class StatusServer:
    """Answers from a thread of its own until `close`."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(f"\0{PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        self._server.listen()
        threading.Thread(target=self._run, name="paceline live", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:
                return
            with line, contextlib.suppress(Exception):  # no question, however odd, is the last
                line.settimeout(LIMIT_S)
                if _user(line) in (0, os.getuid()):
                    question = json.loads(line.makefile("rb").readline(MAX_BYTES))
                    line.sendall(json.dumps(self._answer(question)).encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends the wait for the next
        self._server.close()


class Run(Protocol):
    """Of a training (`step.run_state.RunState`)."""

    world: LaunchEnvironment
    folder: Path | None
    activity: Activity

    @property
    def members(self) -> Membership: ...

    identity: str


def status(run: Run, question: Mapping[str, Any]) -> dict[str, Any]:
    """What a process says of its training; asked for ``stacks``, with its own and those of the ranks that are named."""
    world, mine = run.world, run.activity.tell()
    everyone = run.members.peer_status() or {world.node: mine}
    said = {
        "run": os.environ.get("PACELINE_RUN", ""),
        "folder": str(run.folder.absolute().resolve()) if run.folder else "",
        "command": sys.argv,
        "pid": os.getpid(),
        "node": world.node,
        "num_nodes": world.num_nodes,
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "mine": mine,
        "everyone": everyone,
    }
    if (ranks := question.get("stacks")) is not None:
        others = {rank: run.members.peer_stack(rank) for rank in everyone if rank in ranks}
        said["stacks"] = {
            run.identity: run.activity.stack(),
            **{f"rank {rank} on {everyone[rank]['host']}": stack for rank, stack in others.items()},
        }
    return said


def names() -> list[str]:
    """Of all that answer on this machine."""
    listed = Path("/proc/net/unix").read_bytes().decode(errors="replace")  # anybody may choose a name
    return sorted(set(re.findall(rf"@({PREFIX}\d+-\S+)", listed)))


def query(name: str, limit_s: float = LIMIT_S, **question: Any) -> dict[str, Any] | None:
    """None where nobody answers in time, or another user does."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(limit_s)
        line.connect(f"\0{name}")
        if os.getuid() and _user(line) != os.getuid():
            return None
        line.sendall(json.dumps(question).encode() + b"\n")
        answer = json.loads(line.makefile("rb").read())
        return answer if isinstance(answer, dict) else None
    return None


def state(name: str) -> str:
    """Of who does not answer: its number, the kernel's word for it and its command; empty for another user's."""
    pid = name.removeprefix(PREFIX).partition("-")[0]
    with contextlib.suppress(OSError, ValueError):
        place = Path("/proc") / pid
        if os.getuid() in (0, place.stat().st_uid):
            words = re.search(r"^State:\s*\S+ \((.+)\)", (place / "status").read_text(), re.MULTILINE)
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            return f"pid {pid}, {words[1] if words else 'gone'}: {command}"
    return ""


def stacks(pids: Collection[int]) -> str:
    """Where these processes of this machine stand, as far as they answer within a second."""
    end, found = time.monotonic() + SOON_S, ""
    with contextlib.suppress(Exception):  # who asks is training: no name or answer, however odd, ends it
        for name in names():
            if time.monotonic() < end and int(name.removeprefix(PREFIX).partition("-")[0]) in pids:
                answer = query(name, max(0.1, end - time.monotonic()), stacks=[])
                for who, stack in (answer or {}).get("stacks", {}).items():
                    found += f"{who}:\n{stack}"
    return found


def _user(line: socket.socket) -> int:
    """The user id at the other end."""
    _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
