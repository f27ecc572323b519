"""Launches every node over ssh, with the user's own OpenSSH, keys and configuration."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from paceline.environment import FORMER_NAMES, wait_s
from paceline.launch import detach
from paceline.launch.child_processes import kill
from paceline.launch.doctor.preflight import SSH_FAILED
from paceline.launch.hosts import Host, Way
from paceline.launch.local import GRACE_S, TIMEOUT_S, num_processes, once
from paceline.launch.output import shown
from paceline.launch.supervise import trained_alone
from paceline.launch.supervise.local_nodes import DONE, FAILED, HOLDS, JOINS
from paceline.launch.supervise.node_restarts import RETURNS
from paceline.launch.supervise.remote_node import Node
from paceline.launch.supervise.restart_policy import RETRY_DELAY_S, Ending, Restarts
from paceline.report.log import log

POLL_S = 0.1
MAX_PAUSE_S = 30.0  # between two attempts to reach a host
MARGIN_S = 5.0  # added to a node's own time limit, for its exit to arrive here
START_S = 8.0  # after Ctrl-C, for a host that has not started anything yet
CARRIED = ("PACELINE_", "GLOO_", "NCCL_", "OMP_NUM_THREADS")
NOT_CARRIED = (  # variables that describe this machine
    *("PACELINE_HOST", "PACELINE_STATUS", "PACELINE_SSH", "PACELINE_LOCAL_SIZES", "PACELINE_NODE"),
    *("PACELINE_JOIN_TICKET", FORMER_NAMES["PACELINE_JOIN_TICKET"]),
)


def carried(names: Sequence[str] = ()) -> dict[str, str]:
    """The variables to set on the hosts: those that configure the training, and those named. Raises ValueError."""
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"--env names {', '.join(missing)}, which this environment does not have; set it, or leave it out"
        )
    own = {name: value for name, value in os.environ.items() if name.startswith(CARRIED) and name not in NOT_CARRIED}
    return {**own, **{name: os.environ[name] for name in names}}


@dataclass
class Orders:
    """What all starts of a run share. ``run``: its id on the hosts; ``turn``: the number of the start.

    ``engines``: each node's configuration; "" for the node's default. ``least``, ``most``: number of nodes of a
    fault-tolerant run. It continues after failures while a node has all state; a host whose connection fails is
    reconnected, and further nodes may join. ``check_hosts``: checks all hosts again and returns the rendezvous
    endpoint; raises ValueError. ``together``: see `local.start`. ``on_change``: called after a change.
    """

    command: Sequence[str]
    engines: Sequence[str]
    way: Way
    environment: dict[str, str]
    least: int = 0
    most: int = 0
    check_hosts: Callable[[], tuple[str, int]] | None = None
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = ""
    turn: int = 0
    meeting: tuple[str, int] = "", 0
    members: list[str] = field(default_factory=list)
    together: Callable[[str, int], int] | None = None
    on_change: Callable[[Orders], None] | None = None

    def begin(self, rendezvous: tuple[str, int]) -> None:
        """Begins another start, with a new secret, which processes left of an earlier start do not know."""
        self.secret, self.turn, self.meeting, self.members = secrets.token_hex(32), self.turn + 1, rendezvous, []
        self.save()

    def set_members(self, members: list[str]) -> None:
        if members != self.members:
            self.members = members
            self.save()

    def save(self) -> None:
        if self.on_change:
            self.on_change(self)

    def exit_code(self, nodes: Sequence[Node]) -> int:
        """The exit code of a run whose nodes all exited with 0."""
        found = {node.report.get("found", "") for node in nodes}
        if self.together is None or (trained_alone.UNSTEPPED not in found and len(found) > 1):
            return 0
        what = trained_alone.UNSTEPPED if trained_alone.UNSTEPPED in found else found.pop()
        return self.together(what, sum(num_processes(engine) for engine in self.engines))

    def request(self, node: Node, again: bool) -> dict[str, Any]:
        """The request to a node's agent. ``again``: the node was started before; if it has failed, it joins again."""
        own = {"PYTHONUNBUFFERED": "1", "PACELINE_SECRET": self.secret, **self.environment}
        own["PACELINE_HOST"] = node.host.name
        if self.least:
            own["PACELINE_NODES"] = f"{self.least}:{max(self.most, len(self.engines))}"
        request = {
            **{"node": node.index, "sizes": [num_processes(each) for each in self.engines]},
            **{"host": self.meeting[0], "port": self.meeting[1], "engine": self.engines[node.index]},
            **{"command": [self.way.python, *self.command], "environment": own},
            **{"folder": self.way.at(node.host).folder, "stays": detach.is_detached()},
            **{"returns": RETURNS if self.least else 0, "together": self.together is not None},
        }
        if self.least or self.turn > 1 or self.check_hosts or detach.is_detached():
            request |= {"run": self.run, "turn": self.turn}
        if again and not self.least:
            request["ended"] = True
        elif again:
            hides = self.environment.get("PACELINE_ENCRYPT") == "1"
            request["ticket"] = {"nodes": own["PACELINE_NODES"], "members": self.members, "hides": hides}
        return request


def start(
    hosts: Sequence[Host],
    orders: Orders,
    rendezvous: tuple[str, int] | None,
    result: BinaryIO | None = None,
    restarts: int = 0,
) -> int:
    """Runs Python with a command on every host, the first of them node 0. Returns the first failing node's exit code.

    ``rendezvous``: the endpoint from `check`; None: the nodes of ``orders`` run, and their launcher was killed.
    With ``result`` all output goes to stderr, except a JSON object in the first host's last line. Ctrl-C and SIGTERM
    are passed on once to every process, which then has TIMEOUT_S to end, or START_S on a host that has started nothing.
    A second signal, or a node's failure, shortens that to GRACE_S. A closed output counts as SIGTERM. ``restarts``: how
    often all nodes are restarted from the newest checkpoint, after ``orders.check_hosts``.
    """
    received: list[int] = []
    handler = once(received.append)
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    policy = Restarts(restarts)
    try:
        while True:
            if rendezvous:
                orders.begin(rendezvous)
            ending = _start(hosts, orders, received, handler, result, again=rendezvous is None)
            pause_s = None if received else policy.after(ending)
            next_rendezvous = _rendezvous_again(orders, received, pause_s) if pause_s is not None else None
            if next_rendezvous is None:
                return 128 + received[0] if received else ending.code
            rendezvous = next_rendezvous
            orders.environment["PACELINE_RESUME"] = "1"
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _start(
    hosts: Sequence[Host],
    orders: Orders,
    received: list[int],
    handler: Callable[[int, object], None],
    result: BinaryIO | None,
    again: bool,
) -> Ending:
    """Runs one start of all nodes to its end. ``again``: another launcher has started them."""
    nodes: list[Node] = []
    try:
        for index, host in enumerate(hosts):
            nodes.append(Node(host, index, orders.way, result if index == 0 else None, bool(result)))
        for node in nodes:
            if again:
                node.report, node.previous_code = {"state": JOINS}, SSH_FAILED  # until it reports its state
            node.send(orders.request(node, again))
        failure = _watch(nodes, orders, received, handler)
    finally:
        for node in nodes:
            node.close()
    done = any(node.process.returncode == 0 for node in nodes)
    if received or failure is None:
        return Ending(128 + received[0] if received else orders.exit_code(nodes), done=done)
    first, code = failure
    name, last_line = first.host.name, first.errors.last or "no output"
    what = f"{name} failed first, with exit code"
    if code < 0 or code == SSH_FAILED:  # the exit code of sys.exit(-1), too
        what = f"the connection to {name} failed, {'ssh' if code < 0 else 'or its script'} ended with exit code"
    log.error(f"{what} {code}: {shown(last_line)}")
    faults = frozenset((str(error), step) for node in nodes for error, step in node.failure.get("faults", ()))
    begun = bool(orders.members) or any(node.failure.get("begun") for node in nodes)
    return Ending(code if code > 0 else 128 - code, faults, begun, code < 0 or code > 128, done)


def _rendezvous_again(orders: Orders, received: Sequence[int], pause_s: float) -> tuple[str, int] | None:
    """The next rendezvous endpoint, as soon as all hosts can be reached; None after PACELINE_WAIT or a signal."""
    end, has_logged = time.monotonic() + pause_s + wait_s(), False
    while True:
        due = time.monotonic() + pause_s
        while time.monotonic() < due:
            if received:
                return None
            time.sleep(POLL_S)
        try:
            return orders.check_hosts() if orders.check_hosts else orders.meeting
        except ValueError as error:
            pause_s = min(2 * max(pause_s, RETRY_DELAY_S), MAX_PAUSE_S)
            expired = time.monotonic() + pause_s > end
            if expired or not has_logged:
                log.log(logging.ERROR if expired else logging.WARNING, str(error))
            has_logged = True
            if expired:
                return None


def _watch(
    nodes: list[Node], orders: Orders, received: Sequence[int], handler: Callable[[int, object], None]
) -> tuple[Node, int] | None:
    """Passes output and signals on until all nodes have ended, or until their deadline. If the run could not continue,
    returns the node that failed first and its exit code. ``handler`` adds to ``received``. In a detached run a failed
    connection does not end the run: the node continues to train."""
    first: Node | None = None
    code = 0
    num_sent, end, start_deadline = 0, float("inf"), float("inf")
    detached, restarts = detach.is_detached(), HostRestarts(nodes, orders)
    sys.stdout.flush()
    with selectors.DefaultSelector() as selector:
        for node in nodes:
            node.register(selector)
        while True:
            all_ended = all(node.process.poll() is not None for node in nodes)
            ready = selector.select(0 if all_ended else POLL_S)
            for key, _ in ready:
                if not key.data.pass_on():
                    selector.unregister(key.fileobj)
                if key.data.sink_closed and not received:  # the same Ctrl-C may have ended tee
                    handler(signal.SIGTERM, None)
            for node in nodes:
                node.flush()
            reconnecting = not (first or received) and restarts.reconnect(selector)
            if all_ended and not ready and not reconnecting:
                first = first or _first_failed(nodes, orders.least)
                return (first, code or first.code) if first else None
            for number in received[num_sent:]:
                num_sent += 1
                for node in nodes:
                    node.send(number)
            if first is None and not received and not reconnecting:
                well = (0, SSH_FAILED) if detached else (0,)
                first = restarts.failed() if orders.least else _first_failed(nodes, 0, well)
                code = first.code if first else 0
                for other in nodes if first else ():
                    if other.state == JOINS:  # it has nothing to save
                        other.send(signal.SIGTERM)
                    other.send(0)
            if first or received:
                allowed_s = GRACE_S if first or num_sent > 1 else TIMEOUT_S
                end = min(end, time.monotonic() + allowed_s + MARGIN_S)
            if received:
                start_deadline = min(start_deadline, time.monotonic() + START_S)
            running = [node for node in nodes if node.process.poll() is None]
            if time.monotonic() > start_deadline and (silent := [node for node in running if not node.output.marked]):
                _log_disconnected(silent, "had started nothing yet")
                for node in silent:
                    kill(node.process)
                    node.process.wait()
            if time.monotonic() > end:
                _log_disconnected(running, "did not end in time")
                return (first, code or first.code) if first else None


class HostRestarts:
    """Reconnects hosts whose connections failed, by their names, and restarts their nodes as joining nodes."""

    def __init__(self, nodes: list[Node], orders: Orders):
        self.nodes, self.orders = nodes, orders
        self._failed_s: dict[int, float] = {}  # when a host's connection failed
        self._next_s: dict[int, float] = {}
        self._num_tries: dict[int, int] = {}
        self._num_begun: dict[int, int] = {}  # how often each node was restarted on a reconnected host
        self._first: Node | None = None

    def reconnect(self, selector: selectors.BaseSelector) -> bool:
        """Reconnects the hosts that are due. Returns whether a host may still be reconnected."""
        if not self.orders.least:
            return False
        for node in self.nodes:
            if node.report.get("members") and node.state == HOLDS:
                self.orders.set_members(node.report["members"])
                break
        now = time.monotonic()
        for node in self.nodes:
            if node.process.poll() is None and node.reported and not node.counted:
                node.counted = True
                self._num_begun[node.index] = self._num_begun.get(node.index, -1) + 1
                self._failed_s.pop(node.index, None)
                self._num_tries.pop(node.index, None)
        for node in [node for node in self.nodes if self._is_disconnected(node)]:
            since_s, count = self._failed_s.setdefault(node.index, now), self._num_tries.get(node.index, 0)
            due_s = self._next_s.setdefault(node.index, now + min(RETRY_DELAY_S * 2.0**count, MAX_PAUSE_S))
            if now < due_s or now - since_s > wait_s():
                continue
            del self._next_s[node.index]
            self._num_tries[node.index] = count + 1
            self._reconnect(node, selector)
        pending = [node.index for node in self.nodes if self._is_pending(node)]
        return any(now - self._failed_s.get(index, now) <= wait_s() for index in pending)

    def _is_pending(self, node: Node) -> bool:
        """Whether the node may still have all state: it is to be reconnected, or has not reported since."""
        restarted = bool(node.previous_code) and not node.reported and node.process.poll() is None
        return self._is_disconnected(node) or restarted

    def _is_disconnected(self, node: Node) -> bool:
        """Whether the connection failed, but perhaps not the node, and there is a run that the node could join."""
        code = node.process.poll()
        failed = code is not None and (code == SSH_FAILED or code < 0) and self._num_begun.get(node.index, 0) <= RETURNS
        return failed and bool(self.orders.members) and not any(each.state == DONE for each in self.nodes)

    def _reconnect(self, node: Node, selector: selectors.BaseSelector) -> None:
        if self._num_tries[node.index] == 1:
            log.warning(f"the connection to {node.host.name} failed; reconnecting")
        for pipe in node.pipes:
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(pipe)
        node.close()
        another = Node(node.host, node.index, self.orders.way, node.result, node.quiet)
        another.report, another.failure, another.previous_code = {"state": JOINS}, node.failure, node.code
        another.send(self.orders.request(another, again=True))
        another.register(selector)
        self.nodes[self.nodes.index(node)] = another

    def failed(self) -> Node | None:
        """The node that failed first, if the survivors cannot continue; else None."""
        failed = [node for node in self.nodes if node.state == FAILED and node.process.poll() is not None]
        self._first = self._first or next(iter(failed), None)
        states = [node.state for node in self.nodes]
        if DONE in states:
            return None
        if HOLDS not in states:
            return self._first or self.nodes[0]
        return self._first if len(states) - len(failed) < self.orders.least else None


def _log_disconnected(nodes: Sequence[Node], why: str) -> None:
    log.error(f"ended the connection to {', '.join(node.host.name for node in nodes)}, which {why}")


def _first_failed(nodes: Sequence[Node], least: int, well: Sequence[int] = (0,)) -> Node | None:
    """The first failed node, if fewer than ``least`` (0: all) others are left; ``well``: exit codes of no failure."""
    failed = [node for node in nodes if node.process.poll() not in (None, *well)]
    return failed[0] if len(nodes) - len(failed) < (least or len(nodes)) and failed else None
