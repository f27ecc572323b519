"""Launches all processes of one or several nodes on this machine; none outlives the launcher.

The kernel sends SIGTERM to the child processes when this process ends. The processes detect failures of each other.
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
from paceline.ddp import import_hook
from paceline.environment import variable
from paceline.launch.signals import AGAIN_S
from paceline.launch.supervise.local_nodes import DONE, FAILED, HOLDS, JOINS, Team
from paceline.launch.supervise.node_restarts import NodeRestarts
from paceline.launch.supervise.restart_policy import Ending, Restarts
from paceline.launch.supervise.trained_alone import Notes
from paceline.link.net.ticket import JoinTicket
from paceline.report import process_status
from paceline.report.log import log

GRACE_S = 15.0
TIMEOUT_S = 300.0  # after one Ctrl-C, for a long step and its checkpoint
MAX_RESERVED = 64  # ports; the oldest are released, for processes that start many runs
POLL_S = 0.02

_reserved = deque[int]()  # descriptors of the sockets that `free_port` keeps open


def num_processes(engine: str) -> int:
    """The number of processes of an engine such as "processes:4" or "processes:2/pipeline:2"."""
    name, count = registry.head(engine)
    if not registry.says("engine", name, "starts_processes"):
        return 1
    if count and not (count.isdigit() and int(count) > 0):
        raise ValueError(f"engine {engine!r}: {name}:k needs a whole number k >= 1")
    return int(count or 2)


def free_port() -> int:
    """A TCP port for a server that another process will open, seconds later.

    A socket that is bound but does not listen reserves the port until this process ends. The kernel does not assign the
    port to a process that asks for any, but a server can bind it with SO_REUSEADDR, as all servers do.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = int(reserved.getsockname()[1])
        _reserved.append(reserved.detach())
    if len(_reserved) > MAX_RESERVED:
        os.close(_reserved.popleft())
    return port


def once(act: Callable[[int], object]) -> Callable[[int, object], None]:
    """A handler that calls ``act``, but not for a repetition within AGAIN_S: at a shutdown signals arrive twice."""
    last_s = -math.inf

    def handler(number: int, _: object) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > AGAIN_S:
            last_s = time.monotonic()
            act(number)

    return handler


@dataclass
class Requests:
    """Requests to this launcher while it runs. ``received``: signals, already passed on; ``urgent``: a node on another
    host has failed; ``launcher_lost``: the launcher of all nodes has ended."""

    team: Team
    read_signals: Callable[[], Sequence[int]]
    report: Callable[[dict[str, Any]], None] | None = None
    received: list[int] = field(default_factory=list)
    urgent: bool = False
    launcher_lost: bool = False

    def pass_on(self, number: int) -> None:
        if number != signal.SIGHUP:  # SIGHUP alone does not end the run
            self.received.append(number)
        self.team.send(number)

    def poll(self) -> None:
        for number in self.read_signals():
            self.launcher_lost |= number == signal.SIGHUP
            if number:
                self.pass_on(number)
            else:
                self.urgent = True

    @property
    def is_ending(self) -> bool:
        return bool(self.received) or self.urgent or self.launcher_lost


def start(
    command: Sequence[str],
    engine: str,
    num_nodes: int = 1,
    environment: Mapping[str, str] | None = None,
    node: int | None = None,
    rendezvous: tuple[str, int] | None = None,
    signals: Callable[[], Sequence[int]] | None = None,
    sizes: Sequence[int] = (),
    min_nodes: int = 0,
    returns: int = 0,
    restarts: int = 0,
    together: Callable[[str, int], int] | None = None,
    joins: bool = False,
    report: Callable[[dict[str, Any]], None] | None = None,
    grace_s: float = GRACE_S,
) -> int:
    """Runs ``command`` as all processes of ``num_nodes`` nodes, or of ``node`` alone, here. Returns an exit code.

    It is the exit code of the first process that fails; the others get ``grace_s`` to end by themselves. Ctrl-C and
    SIGTERM are passed on; then the processes have TIMEOUT_S to finish a long step and save a checkpoint. A second
    signal shortens that to GRACE_S.

    engine      a configuration, or "" to let each process choose
    rendezvous  host and port of the rendezvous, which node 0 serves; default: a free port of this machine
    signals     polled: signals to pass on as if this process had received them; 0: all must end within GRACE_S
    sizes       number of processes of each node, if they differ
    min_nodes   number of nodes with which training continues after failures; as long as one node has all state, failed
                nodes are restarted; 0: the failure of one node ends the run
    returns     how often each failed node is restarted as a joining node
    restarts    how often the whole run is restarted from its newest checkpoint, if no node with all state is left
    together    called if several processes ended with 0, with what `Notes` found and their number on all nodes; returns
                the exit code
    joins       the node starts as a joining node, with the token in the file PACELINE_TICKET_FILE
    report      called with the node's state after each change
    """
    sizes = tuple(sizes) or (num_processes(engine),) * num_nodes
    base = _environment(engine, sizes, min_nodes, environment or {})
    with contextlib.ExitStack() as stack:
        team = Team(command, sizes, closed=signals is not None)
        requests = Requests(team, signals or tuple, report)
        handler = once(requests.pass_on)
        for number in (signal.SIGINT, signal.SIGTERM):  # before anything exists that must be removed
            stack.callback(signal.signal, number, signal.signal(number, handler))
        folder: Path | None = None
        if restarts or report or (returns and base.get("PACELINE_NODES")):
            folder = team.reports = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
            base[process_status.VARIABLE] = str(folder)
        notes: Notes | None = None
        if together and sum(sizes) > 1:
            notes = Notes(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))))
            base |= notes.environment(base)
        stack.callback(team.end)
        node_restarts: NodeRestarts | None = None
        if folder and returns and base.get("PACELINE_NODES"):
            ticket = Path(variable("PACELINE_TICKET_FILE", base) or folder / "ticket.json")
            base["PACELINE_TICKET_FILE"] = str(ticket)
            stack.callback(ticket.unlink, missing_ok=True)
            node_restarts = NodeRestarts(ticket, returns, lambda owner: team.begin(owner, _joining(ticket, owner)))
        policy = Restarts(restarts)
        while True:
            _set_environment(team, base, node, rendezvous)
            if node_restarts:
                node_restarts.begin_anew(node is None)
            for owner in range(len(sizes)) if node is None else [node]:
                team.begin(owner, _joining(Path(variable("PACELINE_TICKET_FILE", base)), owner) if joins else None)
            for early in requests.received:  # before the processes started
                team.send(early)
            ending = _watch(team, requests, min_nodes, node_restarts, grace_s)
            pause_s = None if requests.received else policy.after(ending)
            pids = [child.process.pid for child in team.children]
            team.end()
            if pause_s is None or not _pause(requests, pause_s):
                code = 128 + requests.received[0] if requests.received else ending.code
                return together(notes.found(pids), sum(sizes)) if notes and together and code == 0 else code
            base["PACELINE_RESUME"] = "1"


def _environment(engine: str, sizes: Sequence[int], min_nodes: int, more: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that all processes share in all starts."""
    base = {**os.environ, **more}
    base |= import_hook.environment(base)
    if engine:
        base["PACELINE_ENGINE"] = engine
        for name, _ in registry.heads(engine):
            base = {**registry.says("engine", name, "environment"), **base}
    base["WORLD_SIZE"] = str(sum(sizes))
    base.pop("PACELINE_LOCAL_SIZES", None)
    if min_nodes:
        base["PACELINE_NODES"] = f"{min_nodes}:{len(sizes)}"
    if len(set(sizes)) > 1:
        base["PACELINE_LOCAL_SIZES"] = ",".join(map(str, sizes))
    return base


def _joining(ticket: Path, node: int) -> dict[str, str]:
    """The variables of a joining node; its processes rendezvous at a port of their own."""
    return {"PACELINE_JOIN_TICKET": str(ticket), "PACELINE_NODE": str(node), "MASTER_PORT": str(free_port())}


def _report_state(team: Team, requests: Requests, previous: dict[str, Any]) -> dict[str, Any]:
    """Reports the node's state if it differs from the ``previous`` one; returns it."""
    if requests.report is None:
        return previous
    (state,) = team.states().values()
    current: dict[str, Any] = {"state": state, "members": []}
    with contextlib.suppress(ValueError):
        current["members"] = list(JoinTicket.read(Path(variable("PACELINE_TICKET_FILE", team.environment))).members)
    if state == FAILED:
        code = team.code(next(iter(team.states())))
        current |= {"code": code, "faults": sorted(team.faults(), key=str), "begun": team.begun}
    if current != previous:
        requests.report(current)
    return current


def _set_environment(team: Team, base: Mapping[str, str], node: int | None, rendezvous: tuple[str, int] | None) -> None:
    """Sets the variables of one start; processes left of an earlier start have another port and secret."""
    host, port = rendezvous or ("127.0.0.1", free_port())
    team.environment = {**base, "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    if node is None:
        # not on the command line, which every user of the machine can read
        team.environment.setdefault("PACELINE_SECRET", secrets.token_hex(32))


def _pause(requests: Requests, seconds: float) -> bool:
    """Waits; returns False as soon as a signal arrives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not requests.received:
        time.sleep(POLL_S)
    return not requests.received


def _watch(
    team: Team, requests: Requests, min_nodes: int, node_restarts: NodeRestarts | None, grace_s: float
) -> Ending:
    """Waits until all processes have ended, or kills them at their deadline."""
    failure_code: int | None = None
    killed = False
    end, limit_s = float("inf"), float("inf")
    reported: dict[str, Any] = {}
    while True:
        requests.poll()
        reported = _report_state(team, requests, reported)
        all_ended = all(child.code is not None for child in team.children)  # before their states are looked at
        states = team.states()
        failed_nodes = [node for node, state in states.items() if state == FAILED]
        if failure_code is None and failed_nodes and not _continues(states, min_nodes, node_restarts):
            failure_code = team.code(failed_nodes[0])
            # computed before this launcher kills any process itself
            killed = any(code < 0 or code > 128 for code in map(team.code, failed_nodes))
            if min_nodes and not requests.is_ending:
                _release(team, states, joinable=bool(node_restarts and node_restarts.joinable))
        may_restart = bool(node_restarts and failed_nodes) and failure_code is None and not requests.is_ending
        if node_restarts and may_restart and (HOLDS in states.values() if min_nodes else True):
            node_restarts.restart_due(team)
        codes = [child.code for child in team.children]
        ended = any(code is not None for code in codes)
        if failure_code is not None:
            allowed_s = grace_s
        elif requests.urgent or (requests.received and ended) or len(requests.received) > 1:
            allowed_s = GRACE_S
        else:
            allowed_s = TIMEOUT_S if requests.received else float("inf")
        if time.monotonic() + allowed_s < end:
            end, limit_s = time.monotonic() + allowed_s, allowed_s
        if all_ended and None not in codes and (min_nodes or not may_restart):
            break
        if time.monotonic() > end:
            running = [child for child in team.children if child.code is None]
            log.error(f"{len(running)} processes did not end within {limit_s:.0f} s; killed")
            failure_code = failure_code or -signal.SIGKILL
            break
        time.sleep(POLL_S)
    _report_state(team, requests, reported)
    return _ending(team, min_nodes, failure_code, killed)


def _continues(states: Mapping[int, str], min_nodes: int, node_restarts: NodeRestarts | None) -> bool:
    """Whether the run continues after some nodes have failed."""
    failed_nodes = [node for node, state in states.items() if state == FAILED]
    if not min_nodes:  # the other nodes run on other hosts, and this one may be restarted
        return node_restarts is not None and all(map(node_restarts.may_return, failed_nodes))
    if DONE in states.values():
        return True  # the others are about to end as well
    if HOLDS not in states.values():
        return False
    back = [node for node in failed_nodes if node_restarts and node_restarts.may_return(node)]
    return len(states) - len(failed_nodes) + len(back) >= min_nodes


def _release(team: Team, states: Mapping[int, str], joinable: bool) -> None:
    """Ends the nodes of a run that cannot continue: kills joining nodes; nodes with all state get SIGTERM, and save.
    Before the first rendezvous is complete they get no signal: each logs the nodes that it misses."""
    for node, state in states.items():
        if state == JOINS:
            team.end(node)
        elif state == HOLDS and joinable:
            team.send(signal.SIGTERM, node)


def _ending(team: Team, min_nodes: int, failure_code: int | None, killed: bool) -> Ending:
    states = team.states()
    failed_codes = [team.code(node) for node, state in states.items() if state == FAILED]
    num_done = sum(state == DONE for state in states.values())
    if failure_code is None and failed_codes and num_done < max(1, min_nodes):
        failure_code = failed_codes[0]
    code = failure_code or 0
    return Ending(code if code >= 0 else 128 - code, team.faults(), team.begun, killed, num_done > 0)
