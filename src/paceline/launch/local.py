"""Launches all processes of one or several nodes on this machine; none outlives the launcher.

Children die with this process (the kernel tells them), and tell each other of a death themselves.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import registry
from paceline.environment import variable
from paceline.launch.signals import AGAIN_S
from paceline.launch.supervise import process_status
from paceline.launch.supervise.local_nodes import DONE, FAILED, HOLDS, JOINS, Team
from paceline.launch.supervise.node_restarts import NodeRestarts
from paceline.launch.supervise.restart_policy import Ending, Restarts
from paceline.launch.supervise.trained_alone import Notes
from paceline.link.net.ticket import JoinTicket
from paceline.report.log import log

GRACE_S = 15.0
TIMEOUT_S = 300.0  # after one Ctrl-C, for a long step and its checkpoint
MAX_KEPT = 64  # ports, for those who start run after run
POLL_S = 0.02

_kept = deque[int]()  # descriptors of `free_port`


def num_processes(engine: str) -> int:
    """Of an engine like "processes:4" or "processes:2/stages:2"."""
    name, count = registry.head(engine)
    if not registry.says("engine", name, "starts_processes"):
        return 1
    if count and not (count.isdigit() and int(count) > 0):
        raise ValueError(f"engine {engine!r}: {name}:k needs a whole number k >= 1")
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
    if len(_kept) > MAX_KEPT:
        os.close(_kept.popleft())
    return port


def once(act: Callable[[int], object]) -> Callable[[int, object], None]:
    """``act`` as a signal's handler. What ends a service or a machine reaches every process, and some pass it on."""
    last_s = -math.inf

    def handler(number: int, _: object) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > AGAIN_S:
            last_s = time.monotonic()
            act(number)

    return handler


@dataclass
class Asked:
    """What is asked of this launcher while it runs. ``received``: signals, which were passed on; ``hurry``: a node
    elsewhere has failed; ``hung``: the launcher of all is gone."""

    team: Team
    later: Callable[[], Sequence[int]]
    tell: Callable[[dict[str, Any]], None] | None = None
    received: list[int] = field(default_factory=list)
    hurry: bool = False
    hung: bool = False

    def pass_on(self, number: int) -> None:
        if number != signal.SIGHUP:  # which asks for nothing by itself
            self.received.append(number)
        self.team.send(number)

    def look(self) -> None:
        for number in self.later():
            self.hung |= number == signal.SIGHUP
            if number:
                self.pass_on(number)
            else:
                self.hurry = True

    @property
    def ends(self) -> bool:
        return bool(self.received) or self.hurry or self.hung


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
    restarts: int = 0,
    together: Callable[[str, int], int] | None = None,
    joins: bool = False,
    tell: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Runs ``command`` as all processes of ``num_nodes`` nodes, or of ``node`` alone, here. Returns an exit code.

    The first process that fails decides it; the others get GRACE_S to end by themselves. Ctrl-C and SIGTERM are
    passed on, and then there is little hurry: within TIMEOUT_S a long step ends and a checkpoint is saved. A second
    one makes that GRACE_S.

    engine      a row, or "" for what each process chooses by itself
    meeting     host and port where the nodes meet, which node 0 serves; else a free port of this machine
    asked       looked at now and then: signals to pass on as if they had come here; 0 starts the clock
    sizes       the processes of each node, where they differ
    least       nodes that train on when others fail: as long as one node has all state, those that failed are started
                again; 0: one that fails ends all
    returns     how often each of those that failed is started again, as a joining node
    restarts    how often all of them are, from the newest checkpoint, where no node with all state is left
    together    is given what was found of several processes that ended with 0 and met nobody, and how many there are
                on all nodes; says with which exit code that is
    joins       it begins as a joining node, with the ticket that PACELINE_TICKET_FILE names
    tell        is given the node's state when that has changed
    """
    sizes = tuple(sizes) or (num_processes(engine),) * num_nodes
    base = _environment(engine, sizes, least, environment or {})
    with contextlib.ExitStack() as stack:
        team = Team(command, sizes, closed=asked is not None)
        orders = Asked(team, asked or tuple, tell)
        handler = once(orders.pass_on)
        for number in (signal.SIGINT, signal.SIGTERM):  # before there is anything to leave behind
            stack.callback(signal.signal, number, signal.signal(number, handler))
        folder: Path | None = None
        if restarts or tell or (returns and base.get("PACELINE_NODES")):
            folder = team.reports = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
            base[process_status.VARIABLE] = str(folder)
        notes: Notes | None = None
        if together and sum(sizes) > 1:
            notes = Notes(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))))
            base |= notes.environment(base)
        stack.callback(team.end)
        again: NodeRestarts | None = None
        if folder and returns and base.get("PACELINE_NODES"):
            ticket = Path(variable("PACELINE_TICKET_FILE", base) or folder / "ticket.json")
            base["PACELINE_TICKET_FILE"] = str(ticket)
            stack.callback(ticket.unlink, missing_ok=True)
            again = NodeRestarts(ticket, returns, lambda owner: team.begin(owner, _joining(ticket, owner)))
        policy = Restarts(restarts)
        while True:
            _lay(team, base, node, meeting)
            if again:
                again.begin_anew(node is None)
            for owner in range(len(sizes)) if node is None else [node]:
                team.begin(owner, _joining(Path(variable("PACELINE_TICKET_FILE", base)), owner) if joins else None)
            for early in orders.received:  # before there was anybody to hear it
                team.send(early)
            ending = _watch(team, orders, least, again)
            pause_s = None if orders.received else policy.after(ending)
            pids = [child.process.pid for child in team.children]
            team.end()
            if pause_s is None or not _pause(orders, pause_s):
                code = 128 + orders.received[0] if orders.received else ending.code
                return together(notes.found(pids), sum(sizes)) if notes and together and code == 0 else code
            base["PACELINE_RESUME"] = "1"


def _environment(engine: str, sizes: Sequence[int], least: int, more: Mapping[str, str]) -> dict[str, str]:
    """What all processes have in theirs, start after start."""
    base = {**os.environ, **more}
    if engine:
        base["PACELINE_ENGINE"] = engine
        base = {**registry.says("engine", registry.head(engine)[0], "environment"), **base}
    base["WORLD_SIZE"] = str(sum(sizes))
    base.pop("PACELINE_LOCAL_SIZES", None)
    if least:
        base["PACELINE_NODES"] = f"{least}:{len(sizes)}"
    if len(set(sizes)) > 1:
        base["PACELINE_LOCAL_SIZES"] = ",".join(map(str, sizes))
    return base


def _joining(ticket: Path, node: int) -> dict[str, str]:
    """The variables of a joining node. Its processes meet at a port of its own."""
    return {"PACELINE_JOIN_TICKET": str(ticket), "PACELINE_NODE": str(node), "MASTER_PORT": str(free_port())}


def _tell(team: Team, orders: Asked, before: dict[str, Any]) -> dict[str, Any]:
    """Its node's state, where it is another than before."""
    if orders.tell is None:
        return before
    (state,) = team.states().values()
    report: dict[str, Any] = {"state": state, "members": []}
    with contextlib.suppress(ValueError):
        report["members"] = list(JoinTicket.read(Path(variable("PACELINE_TICKET_FILE", team.environment))).members)
    if state == FAILED:
        code = team.code(next(iter(team.states())))
        report |= {"code": code, "faults": sorted(team.faults(), key=str), "begun": team.begun}
    if report != before:
        orders.tell(report)
    return report


def _lay(team: Team, base: Mapping[str, str], node: int | None, meeting: tuple[str, int] | None) -> None:
    """The variables of a start: those who are left of the one before have another port and secret."""
    host, port = meeting or ("127.0.0.1", free_port())
    team.environment = {**base, "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    if node is None:
        # in the environment alone: everyone reads command lines
        team.environment.setdefault("PACELINE_SECRET", secrets.token_hex(32))


def _pause(orders: Asked, seconds: float) -> bool:
    """False where a signal came meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not orders.received:
        time.sleep(POLL_S)
    return not orders.received


def _watch(team: Team, orders: Asked, least: int, again: NodeRestarts | None) -> Ending:
    """Until all have ended, or had their time."""
    failed: int | None = None
    killed = False
    end, limit_s = float("inf"), float("inf")
    report: dict[str, Any] = {}
    while True:
        orders.look()
        report = _tell(team, orders, report)
        states = team.states()
        lost = [node for node, state in states.items() if state == FAILED]
        if failed is None and lost and not _go_on(states, least, again):
            failed = team.code(lost[0])
            # and not by this launcher, as others may be now
            killed = any(code < 0 or code > 128 for code in map(team.code, lost))
            if least and not orders.ends:
                _let_go(team, states, met=bool(again and again.met))
        coming = again is not None and bool(lost) and failed is None and not orders.ends
        if again and coming and (HOLDS in states.values() if least else True):
            again.look(team)
        codes = [child.code for child in team.children]
        ended = any(code is not None for code in codes)
        if orders.hurry or failed is not None or (orders.received and ended) or len(orders.received) > 1:
            allowed_s = GRACE_S
        else:
            allowed_s = TIMEOUT_S if orders.received else float("inf")
        if time.monotonic() + allowed_s < end:
            end, limit_s = time.monotonic() + allowed_s, allowed_s
        if None not in codes and (least or not coming):
            break
        if time.monotonic() > end:
            left = [child for child in team.children if child.code is None]
            log.error(f"{len(left)} processes did not end within {limit_s:.0f} s; killed")
            failed = failed or -signal.SIGKILL
            break
        time.sleep(POLL_S)
    _tell(team, orders, report)
    return _ending(team, least, failed, killed)


def _go_on(states: Mapping[int, str], least: int, again: NodeRestarts | None) -> bool:
    """Whether the run does, after some nodes have failed."""
    lost = [node for node, state in states.items() if state == FAILED]
    if not least:  # the other nodes are elsewhere, and this one may come back
        return again is not None and all(map(again.hopes, lost))
    if DONE in states.values():
        return True  # the others are about to end as well
    if HOLDS not in states.values():
        return False
    back = [node for node in lost if again and again.hopes(node)]
    return len(states) - len(lost) + len(back) >= least


def _let_go(team: Team, states: Mapping[int, str], met: bool) -> None:
    """Those who ask to join have nobody to join; those who have all state, and wait for more nodes than can come back,
    save and end. Before all have met, each says by itself whom it misses."""
    for node, state in states.items():
        if state == JOINS:
            team.end(node)
        elif state == HOLDS and met:
            team.send(signal.SIGTERM, node)


def _ending(team: Team, least: int, failed: int | None, killed: bool) -> Ending:
    states = team.states()
    lost = [team.code(node) for node, state in states.items() if state == FAILED]
    num_done = sum(state == DONE for state in states.values())
    if failed is None and lost and num_done < max(1, least):
        failed = lost[0]
    code = failed or 0
    return Ending(code if code >= 0 else 128 - code, team.faults(), team.begun, killed, num_done > 0)
