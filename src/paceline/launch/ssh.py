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
from paceline.launch.doctor.preflight import LOST
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
MARGIN_S = 5.0  # in which a node's own end, after GRACE_S, gets through to here
START_S = 8.0  # after Ctrl-C, for a host that has not started anything yet
CARRIED = ("PACELINE_", "GLOO_", "NCCL_", "OMP_NUM_THREADS")
LEFT_HERE = (  # they are about this machine
    *("PACELINE_HOST", "PACELINE_STATUS", "PACELINE_SSH", "PACELINE_LOCAL_SIZES", "PACELINE_NODE"),
    *("PACELINE_JOIN_TICKET", FORMER_NAMES["PACELINE_JOIN_TICKET"]),
)


def carried(names: Sequence[str] = ()) -> dict[str, str]:
    """The variables that go along: those that are about the training, and those named. Raises ValueError."""
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"--env names {', '.join(missing)}, which this environment does not have; set it, or leave it out"
        )
    mine = {name: value for name, value in os.environ.items() if name.startswith(CARRIED) and name not in LEFT_HERE}
    return {**mine, **{name: os.environ[name] for name in names}}


@dataclass
class Orders:
    """What all starts of a run share. ``run``: its name on the hosts.

    ``engines``: the row of every node; "" for a node's default. ``least``, ``most``: nodes, where some may fail: a
    failure ends nothing as long as a node has all state, a host whose line is lost is reached again by its name, and
    others may join. ``meet``: checks every host once more, and says where they meet; raises ValueError. ``together``:
    as of `local.start`. ``keep``: is given these when they have changed.
    """

    command: Sequence[str]
    engines: Sequence[str]
    way: Way
    environment: dict[str, str]
    least: int = 0
    most: int = 0
    meet: Callable[[], tuple[str, int]] | None = None
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    secret: str = ""
    turn: int = 0
    meeting: tuple[str, int] = "", 0
    members: list[str] = field(default_factory=list)
    together: Callable[[str, int], int] | None = None
    keep: Callable[[Orders], None] | None = None

    def begin(self, meeting: tuple[str, int]) -> None:
        """Another start: who is left of the one before does not know its secret."""
        self.secret, self.turn, self.meeting, self.members = secrets.token_hex(32), self.turn + 1, meeting, []
        self.kept()

    def met(self, members: list[str]) -> None:
        if members != self.members:
            self.members = members
            self.kept()

    def kept(self) -> None:
        if self.keep:
            self.keep(self)

    def judge(self, nodes: Sequence[Node]) -> int:
        """The exit code of nodes that all ended with 0."""
        found = {node.said.get("found", "") for node in nodes}
        if self.together is None or (trained_alone.UNSTEPPED not in found and len(found) > 1):
            return 0
        what = trained_alone.UNSTEPPED if trained_alone.UNSTEPPED in found else found.pop()
        return self.together(what, sum(num_processes(engine) for engine in self.engines))

    def of(self, node: Node, again: bool) -> dict[str, Any]:
        """What a host is told. ``again``: its node was started before; if it has ended, it joins those that train."""
        own = {"PYTHONUNBUFFERED": "1", "PACELINE_SECRET": self.secret, **self.environment}
        own["PACELINE_HOST"] = node.host.name
        if self.least:
            own["PACELINE_NODES"] = f"{self.least}:{max(self.most, len(self.engines))}"
        said = {
            **{"node": node.index, "sizes": [num_processes(each) for each in self.engines]},
            **{"host": self.meeting[0], "port": self.meeting[1], "engine": self.engines[node.index]},
            **{"command": [self.way.python, *self.command], "environment": own},
            **{"folder": self.way.at(node.host).folder, "stays": detach.left()},
            **{"returns": RETURNS if self.least else 0, "together": self.together is not None},
        }
        if self.least or self.turn > 1 or self.meet or detach.left():
            said |= {"run": self.run, "turn": self.turn}
        if again and not self.least:
            said["ended"] = True
        elif again:
            hides = self.environment.get("PACELINE_ENCRYPT") == "1"
            said["ticket"] = {"nodes": own["PACELINE_NODES"], "members": self.members, "hides": hides}
        return said


def start(
    hosts: Sequence[Host],
    orders: Orders,
    meeting: tuple[str, int] | None,
    result: BinaryIO | None = None,
    restarts: int = 0,
) -> int:
    """Runs Python with a command on every host, the first of them node 0. Returns the first failing node's exit code.

    ``meeting``: what `check` found; None: what ``orders`` say was started, and its launcher was killed. With
    ``result`` all output goes to stderr, but for a JSON object in the first host's last line. Ctrl-C and SIGTERM are
    passed on to every process of every node, once, which then have TIMEOUT_S, or START_S where nothing has started
    yet; a second one gives them GRACE_S, as a node's failure does. Where nobody reads the output any more, that is a
    SIGTERM. ``restarts``: how often all nodes are started again, from the newest checkpoint, once ``orders.meet`` says
    where.
    """
    received: list[int] = []
    heard = once(received.append)
    before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    policy = Restarts(restarts)
    try:
        while True:
            if meeting:
                orders.begin(meeting)
            ending = _start(hosts, orders, received, heard, result, again=meeting is None)
            pause_s = None if received else policy.after(ending)
            found = _meet_again(orders, received, pause_s) if pause_s is not None else None
            if found is None:
                return 128 + received[0] if received else ending.code
            meeting = found
            orders.environment["PACELINE_RESUME"] = "1"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    hosts: Sequence[Host],
    orders: Orders,
    received: list[int],
    heard: Callable[[int, object], None],
    result: BinaryIO | None,
    again: bool,
) -> Ending:
    """One start of all nodes, to its end. ``again``: they were started by another launcher."""
    nodes: list[Node] = []
    try:
        for index, host in enumerate(hosts):
            nodes.append(Node(host, index, orders.way, result if index == 0 else None, bool(result)))
        for node in nodes:
            if again:
                node.said, node.lost = {"state": JOINS}, LOST  # unless it says otherwise
            node.tell(orders.of(node, again))
        failure = _watch(nodes, orders, received, heard)
    finally:
        for node in nodes:
            node.close()
    done = any(node.process.returncode == 0 for node in nodes)
    if received or failure is None:
        return Ending(128 + received[0] if received else orders.judge(nodes), done=done)
    first, code = failure
    name, said = first.host.name, first.errors.last or "it said nothing"
    what = f"lost {name}, ssh ended with exit code" if code < 0 else f"{name} failed first, with exit code"
    if code == LOST:  # sys.exit(-1) ends with it as well
        what = f"lost {name}, or its script ended with exit code"
    log.error(f"{what} {code}: {shown(said)}")
    faults = frozenset((str(error), step) for node in nodes for error, step in node.failure.get("faults", ()))
    begun = bool(orders.members) or any(node.failure.get("begun") for node in nodes)
    return Ending(code if code > 0 else 128 - code, faults, begun, code < 0 or code > 128, done)


def _meet_again(orders: Orders, received: Sequence[int], pause_s: float) -> tuple[str, int] | None:
    """Where the hosts meet next, once all of them can be reached; None where that is not within PACELINE_WAIT, or a
    signal came."""
    end, told = time.monotonic() + pause_s + wait_s(), False
    while True:
        later = time.monotonic() + pause_s
        while time.monotonic() < later:
            if received:
                return None
            time.sleep(POLL_S)
        try:
            return orders.meet() if orders.meet else orders.meeting
        except ValueError as error:
            pause_s = min(2 * max(pause_s, RETRY_DELAY_S), MAX_PAUSE_S)
            over = time.monotonic() + pause_s > end
            if over or not told:
                log.log(logging.ERROR if over else logging.WARNING, str(error))
            told = True
            if over:
                return None


def _watch(
    nodes: list[Node], orders: Orders, received: Sequence[int], heard: Callable[[int, object], None]
) -> tuple[Node, int] | None:
    """Passes lines and signals on until all have ended, or had their time. Returns the node that failed first and its
    exit code, where the others could not train on. ``heard``: adds to ``received``. In a detached run a node whose line
    is lost trains on, and the others with it."""
    first: Node | None = None
    code = 0
    told, end, late = 0, float("inf"), float("inf")
    stay, lines = detach.left(), HostRestarts(nodes, orders)
    sys.stdout.flush()
    with selectors.DefaultSelector() as selector:
        for node in nodes:
            node.register(selector)
        while True:
            over = all(node.process.poll() is not None for node in nodes)
            ready = selector.select(0 if over else POLL_S)
            for key, _ in ready:
                if not key.data.pass_on():
                    selector.unregister(key.fileobj)
                if key.data.unheard and not received:  # tee may have died of the Ctrl-C that comes here, too
                    heard(signal.SIGTERM, None)
            for node in nodes:
                node.flush()
            back = not (first or received) and lines.look(selector)
            if over and not ready and not back:
                first = first or _first_failed(nodes, orders.least)
                return (first, code or first.code) if first else None
            for number in received[told:]:
                told += 1
                for node in nodes:
                    node.tell(number)
            if first is None and not received and not back:
                first = lines.failed() if orders.least else _first_failed(nodes, 0, (0, LOST) if stay else (0,))
                code = first.code if first else 0
                for other in nodes if first else ():
                    if other.state == JOINS:  # it has nothing to save
                        other.tell(signal.SIGTERM)
                    other.tell(0)
            if first or received:
                allowed_s = GRACE_S if first or told > 1 else TIMEOUT_S
                end = min(end, time.monotonic() + allowed_s + MARGIN_S)
            if received:
                late = min(late, time.monotonic() + START_S)
            running = [node for node in nodes if node.process.poll() is None]
            if time.monotonic() > late and (hung := [node for node in running if not node.output.marked]):
                _log_cut_off(hung, "had started nothing yet")
                for node in hung:
                    kill(node.process)
                    node.process.wait()
            if time.monotonic() > end:
                _log_cut_off(running, "did not end in time")
                return (first, code or first.code) if first else None


class HostRestarts:
    """Hosts whose lines are lost are reached again by their names, and start their nodes as joining nodes there."""

    def __init__(self, nodes: list[Node], orders: Orders):
        self.nodes, self.orders = nodes, orders
        self._lost_s: dict[int, float] = {}  # since when no line to a host has held
        self._next_s: dict[int, float] = {}
        self._count: dict[int, int] = {}
        self._begun: dict[int, int] = {}  # how often each node was started on a host that was reached again
        self._first: Node | None = None

    def look(self, selector: selectors.BaseSelector) -> bool:
        """Whether a host is still to be reached."""
        if not self.orders.least:
            return False
        for node in self.nodes:
            if node.said.get("members") and node.state == HOLDS:
                self.orders.met(node.said["members"])
                break
        now = time.monotonic()
        for node in self.nodes:
            if node.process.poll() is None and node.heard and not node.counted:
                node.counted = True
                self._begun[node.index] = self._begun.get(node.index, -1) + 1
                self._lost_s.pop(node.index, None)
                self._count.pop(node.index, None)
        for node in [node for node in self.nodes if self._away(node)]:
            since_s, count = self._lost_s.setdefault(node.index, now), self._count.get(node.index, 0)
            due_s = self._next_s.setdefault(node.index, now + min(RETRY_DELAY_S * 2.0**count, MAX_PAUSE_S))
            if now < due_s or now - since_s > wait_s():
                continue
            del self._next_s[node.index]
            self._count[node.index] = count + 1
            self._reach(node, selector)
        return any(now - self._lost_s.get(node.index, now) <= wait_s() for node in self.nodes if self._unknown(node))

    def _unknown(self, node: Node) -> bool:
        """Whether it may still have all state, as far as is known: it is to be reached, or has not answered yet."""
        return self._away(node) or (bool(node.lost) and not node.heard and node.process.poll() is None)

    def _away(self, node: Node) -> bool:
        """Its line is lost, and not its node, as far as is known. Before all have met there is nothing to join."""
        code = node.process.poll()
        lost = code is not None and (code == LOST or code < 0) and self._begun.get(node.index, 0) <= RETURNS
        return lost and bool(self.orders.members) and not any(each.state == DONE for each in self.nodes)

    def _reach(self, node: Node, selector: selectors.BaseSelector) -> None:
        if self._count[node.index] == 1:
            log.warning(f"the connection to {node.host.name} failed; reconnecting")
        for pipe in node.pipes:
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(pipe)
        node.close()
        another = Node(node.host, node.index, self.orders.way, node.result, node.quiet)
        another.said, another.failure, another.lost = {"state": JOINS}, node.failure, node.code
        another.tell(self.orders.of(another, again=True))
        another.register(selector)
        self.nodes[self.nodes.index(node)] = another

    def failed(self) -> Node | None:
        """The first that failed, where those who are left cannot end the training."""
        failed = [node for node in self.nodes if node.state == FAILED and node.process.poll() is not None]
        self._first = self._first or next(iter(failed), None)
        states = [node.state for node in self.nodes]
        if DONE in states:
            return None
        if HOLDS not in states:
            return self._first or self.nodes[0]
        return self._first if len(states) - len(failed) < self.orders.least else None


def _log_cut_off(nodes: Sequence[Node], why: str) -> None:
    log.error(f"cut off from {', '.join(node.host.name for node in nodes)}, which {why}")


def _first_failed(nodes: Sequence[Node], least: int, well: Sequence[int] = (0,)) -> Node | None:
    """None as long as enough have not. ``least``: 0: all. ``well``: codes that are no failure."""
    failed = [node for node in nodes if node.process.poll() not in (None, *well)]
    return failed[0] if len(nodes) - len(failed) < (least or len(nodes)) and failed else None
