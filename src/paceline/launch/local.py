"""Every process of one node or of several on this machine, and nothing left when any of them, or this one, is killed.

Children die with this process (the kernel tells them), and tell each other of a death themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.launch.again import Again, Child

GRACE_S = 15.0
PATIENCE_S = 300.0  # after one Ctrl-C, for a long step and its checkpoint
MOST_KEPT = 64  # ports, for those who start run after run
AGAIN_S = 0.3  # in which a signal that comes again is the same one
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)
_kept = deque[int]()  # descriptors of `free_port`


def num_processes(engine: str) -> int:
    """Of an engine like "processes:4" or "processes:2/stages:2"."""
    head = engine.partition("+")[0].partition("/")[0]
    name, _, count = head.partition(":")
    if name != "processes":
        return 1
    if count and not (count.isdigit() and int(count) > 0):
        raise ValueError(f"engine {engine!r}: processes:k needs a whole number k >= 1")
    return int(count or 2)


def free_port() -> int:
    """A TCP port for a server that another process will open, seconds later.

    A socket that is bound but does not listen keeps it here until this process ends: the kernel gives the port to
    nobody who asks for any, and a server that names it may open it (with SO_REUSEADDR, as all servers do).
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = int(kept.getsockname()[1])
        _kept.append(kept.detach())
    if len(_kept) > MOST_KEPT:
        os.close(_kept.popleft())
    return port


def once(act: Callable[[int], object]) -> Callable[[int, object], None]:
    """``act`` as a signal's handler. What ends a service or a machine reaches every process, and some pass it on."""
    last_s = -math.inf

    def heard(number: int, _: object) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > AGAIN_S:
            last_s = time.monotonic()
            act(number)

    return heard


def start(
    command: Sequence[str],
    engine: str,
    num_nodes: int = 1,
    environment: Mapping[str, str] | None = None,
    node: int | None = None,
    meeting: tuple[str, int] | None = None,
    asked: Callable[[], Sequence[int]] | None = None,
    sizes: Sequence[int] = (),
    least: int = 0,
    returns: int = 0,
) -> int:
    """Runs ``command`` as all processes of ``num_nodes`` nodes, or of ``node`` alone, here. Returns an exit code.

    The first process that fails decides it; the others get GRACE_S to end by themselves. Ctrl-C and SIGTERM are
    passed on, and then there is little hurry: within PATIENCE_S a long step ends and a checkpoint is saved. A second
    one makes that GRACE_S.

    engine      a row, or "" for what each process chooses by itself
    meeting     host and port where the nodes meet, which node 0 serves; else a free port of this machine
    asked       looked at now and then: signals to pass on as if they had come here; 0 starts the clock
    sizes       the processes of each node, where they differ
    least       nodes that may go on when others fail; 0: one that fails ends all
    returns     how often each of those that failed is started again, to come to the others late
    """
    sizes = tuple(sizes) or (num_processes(engine),) * num_nodes
    host, port = meeting or ("127.0.0.1", free_port())
    base = {**os.environ, **(environment or {})}
    if engine:
        base["PACELINE_ENGINE"] = engine
        if engine.startswith("replicas"):
            # OpenMP's threads spin after the update that all cores share, on the cores where replicas compute then
            base.setdefault("OMP_WAIT_POLICY", "passive")
    base.update(
        WORLD_SIZE=str(sum(sizes)),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )
    base.pop("PACELINE_LOCAL_SIZES", None)
    if least:
        base["PACELINE_NODES"] = f"{least}:{len(sizes)}"
    if len(set(sizes)) > 1:
        base["PACELINE_LOCAL_SIZES"] = ",".join(map(str, sizes))
    if node is None:
        base.setdefault(
            "PACELINE_SECRET", secrets.token_hex(32)
        )  # in the environment alone: everyone reads command lines
    parent = os.getpid()

    def die_with_parent() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(143)

    children: list[Child] = []
    received: list[int] = []

    def pass_on(number: int) -> None:
        if number != signal.SIGHUP:  # which asks for nothing by itself
            received.append(number)
        for child in children:
            if child.code is None:
                child.process.send_signal(number)

    def begin(owner: int, more: Mapping[str, str]) -> None:
        """All processes of a node."""
        for local_rank in range(sizes[owner]):
            rank = sum(sizes[:owner]) + local_rank
            own = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": sizes[owner], "GROUP_RANK": owner}
            mine = {**base, **{name: str(number) for name, number in own.items()}, **more}
            quiet = subprocess.DEVNULL if local_rank else None  # what a script prints is read once per node
            process = subprocess.Popen(
                command,
                env=mine,
                stdin=subprocess.DEVNULL if asked else None,  # what is asked must not be read by a script
                stdout=quiet,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has no threads
                start_new_session=True,  # a terminal's Ctrl-C comes to the launcher alone, and is passed on once
            )
            children.append(Child(owner, process))

    heard = once(pass_on)
    before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.ExitStack() as stack:
            again: Again | None = None
            if returns and base.get("PACELINE_NODES"):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
                ticket = Path(base.setdefault("PACELINE_TICKET", os.path.join(folder, "ticket.json")))
                stack.callback(ticket.unlink, missing_ok=True)
                if node is None:
                    ticket.unlink(missing_ok=True)  # of a run that was killed: nobody is there to come to
                back = {"PACELINE_JOIN": str(ticket)}
                again = Again(ticket, returns, lambda owner: begin(owner, {**back, "PACELINE_NODE": str(owner)}))
            try:
                for owner in range(len(sizes)) if node is None else [node]:
                    begin(owner, {})
                return _wait(children, least, received, pass_on, asked or tuple, again)
            finally:
                for child in children:
                    child.end()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(
    children: list[Child],
    least: int,
    received: Sequence[int],
    pass_on: Callable[[int], None],
    asked: Callable[[], Sequence[int]],
    again: Again | None,
) -> int:
    failed: int | None = None
    num_nodes = len({child.node for child in children})
    hurry = hung = False
    lost = dict[int, int]()  # nodes that failed, and with which code
    end, limit_s = float("inf"), float("inf")
    while True:
        for number in asked():
            hung |= number == signal.SIGHUP
            if number:
                pass_on(number)
            else:
                hurry = True
        for child in children:
            if child.code:
                lost.setdefault(child.node, child.code)
        if failed is None and lost and not _go_on(num_nodes, least, lost, again):
            failed = next(iter(lost.values()))
        codes = [child.code for child in children]
        coming = again is not None and bool(lost) and failed is None and not received and not hurry and not hung
        if again and coming and (None in codes or not least):
            for node in again.look(children):
                del lost[node]
            codes = [child.code for child in children]
        ended = any(code is not None for code in codes)
        if hurry or failed is not None or (received and ended) or len(received) > 1:
            allowed_s = GRACE_S
        else:
            allowed_s = PATIENCE_S if received else float("inf")
        if time.monotonic() + allowed_s < end:
            end, limit_s = time.monotonic() + allowed_s, allowed_s
        if None not in codes and (least or not coming):
            break
        if time.monotonic() > end:
            left = [child for child in children if child.code is None]
            print(f"paceline: {len(left)} processes did not end within {limit_s:.0f} s; killed", file=sys.stderr)
            failed = failed or -signal.SIGKILL
            break
        time.sleep(0.02)
    if received:
        return 128 + received[0]
    if failed is None and lost and not least:
        failed = next(iter(lost.values()))
    if failed is None:
        return 0
    return failed if failed > 0 else 128 - failed


def _go_on(num_nodes: int, least: int, lost: Mapping[int, int], again: Again | None) -> bool:
    """Whether the run does after these failures; where the other nodes are elsewhere, this one may come back."""
    if least:
        return num_nodes - len(lost) >= least
    return again is not None and all(map(again.hopes, lost))
