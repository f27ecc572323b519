"""Every node over ssh, with the user's own OpenSSH, keys and configuration; started together, ended together."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from paceline.launch import detach
from paceline.launch.again import RETURNS
from paceline.launch.calls import kill
from paceline.launch.check import LOST
from paceline.launch.hosts import OWN_PATH, Host, Way
from paceline.launch.lines import Lines, shown
from paceline.launch.local import GRACE_S, PATIENCE_S, num_processes, once
from paceline.launch.node import STARTED

NODE = f"{OWN_PATH}; from paceline.launch import node; sys.exit(node.main())"
GLANCE_S = 0.1
MARGIN_S = 5.0  # in which a node's own end, after GRACE_S, gets through to here
START_S = 8.0  # after Ctrl-C, for a host that has not started anything yet
CARRIED = ("PACELINE_", "GLOO_", "NCCL_", "OMP_NUM_THREADS")
# they are about this machine
LEFT_HERE = ("PACELINE_HOST", "PACELINE_SSH", "PACELINE_LOCAL_SIZES", "PACELINE_JOIN", "PACELINE_NODE")


def carried(names: Sequence[str] = ()) -> dict[str, str]:
    """The variables that go along: those that are about the training, and those named. Raises ValueError."""
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"--env names {', '.join(missing)}, which this environment does not have; set it, or leave it out"
        )
    mine = {name: value for name, value in os.environ.items() if name.startswith(CARRIED) and name not in LEFT_HERE}
    return {**mine, **{name: os.environ[name] for name in names}}


def start(
    hosts: Sequence[Host],
    command: Sequence[str],
    engine: str | Sequence[str],
    way: Way,
    environment: Mapping[str, str],
    meeting: tuple[str, int],
    result: BinaryIO | None = None,
    least: int = 0,
    most: int = 0,
) -> int:
    """Runs Python with ``command`` on every host, the first of them node 0. Returns the first failing node's exit code.

    ``engine``: the row of every node, or of each; "" for a node's default. ``meeting``: what `check` found. With
    ``result`` all output goes to stderr, but for a JSON object in the first host's last line. Ctrl-C and SIGTERM are
    passed on to every process of every node, once, which then have PATIENCE_S, or START_S where nothing has started
    yet; a second one gives them GRACE_S, as a node's failure does. Where nobody reads the output any more, that is a
    SIGTERM. With ``least`` a failure ends nothing as long as so many nodes run, and others may come late, up to
    ``most``.
    """
    received: list[int] = []
    engines = [engine] * len(hosts) if isinstance(engine, str) else list(engine)
    sizes = [num_processes(each) for each in engines]
    secret = secrets.token_hex(32)  # of this run; it travels through stdin, as everything here
    heard = once(received.append)
    before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    nodes: list[Node] = []
    try:
        for host in hosts:
            nodes.append(Node(host, way, result, first=not nodes))
        for index, node in enumerate(nodes):
            own = {"PYTHONUNBUFFERED": "1", "PACELINE_SECRET": secret, **environment, "PACELINE_HOST": node.host.name}
            if least:
                own["PACELINE_NODES"] = f"{least}:{max(most, len(hosts))}"
            node.tell(
                {
                    **{"node": index, "sizes": sizes, "host": meeting[0], "port": meeting[1]},
                    **{"engine": engines[index], "command": [way.python, *command], "environment": own},
                    **{"folder": way.at(node.host).folder, "stays": detach.left()},
                    "returns": RETURNS if least else 0,
                }
            )
        first = _watch(nodes, received, heard, least or len(nodes), detach.left())
    finally:
        for node in nodes:
            node.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        return 128 + received[0]
    if first is None:
        return 0
    code = first.process.returncode
    name, said = first.host.name, first.errors.last or "it said nothing"
    what = f"lost {name}, ssh ended with exit code" if code < 0 else f"{name} failed first, with exit code"
    if code == LOST:  # sys.exit(-1) ends with it as well
        what = f"lost {name}, or its script ended with exit code"
    print(f"paceline: {what} {code}: {shown(said)}", file=sys.stderr)
    return code if code > 0 else 128 - code


class Node:
    """One host's ssh."""

    def __init__(self, host: Host, way: Way, result: BinaryIO | None = None, first: bool = True):
        self.host = host
        self.process = subprocess.Popen(
            way.command(host, "-c", NODE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C comes to the launcher alone
        )
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stderr
        self.stdin, self._untold = self.process.stdin, bytearray()
        os.set_blocking(self.stdin.fileno(), False)  # an ssh that has stalled takes no more than a pipe holds
        out = sys.stderr if result else sys.stdout
        self.output = Lines(host.name, self.process.stdout.fileno(), out.buffer, result if first else None, STARTED)
        self.errors = Lines(host.name, self.process.stderr.fileno(), sys.stderr.buffer)
        self.pipes = {self.process.stdout: self.output, self.process.stderr: self.errors}

    def tell(self, what: object) -> None:
        self._untold += json.dumps(what).encode() + b"\n"
        self.go_on()

    def go_on(self) -> None:
        """Tells as much of what is left to tell as is taken at once."""
        with contextlib.suppress(OSError):  # its end is seen by whoever waits for it
            while self._untold:
                del self._untold[: os.write(self.stdin.fileno(), self._untold)]

    def close(self) -> None:
        """Ends it there as well: what runs there sees its stdin end."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.stdin, *self.pipes):
            with contextlib.suppress(OSError):
                pipe.close()


def _watch(
    nodes: Sequence[Node], received: Sequence[int], heard: Callable[[int, object], None], least: int, stay: bool
) -> Node | None:
    """Passes lines and signals on until all have ended, or had their time. Returns the node that failed first, where
    fewer than ``least`` did not. ``heard``: adds to ``received``. ``stay``: a node whose line is lost trains on, and
    the others with it."""
    first: Node | None = None
    told, end, late = 0, float("inf"), float("inf")
    sys.stdout.flush()
    with selectors.DefaultSelector() as selector:
        for node in nodes:
            for pipe, lines in node.pipes.items():
                selector.register(pipe, selectors.EVENT_READ, lines)
        while True:
            over = all(node.process.poll() is not None for node in nodes)
            ready = selector.select(0 if over else GLANCE_S)
            for key, _ in ready:
                if not key.data.pass_on():
                    selector.unregister(key.fileobj)
                if key.data.unheard and not received:  # tee may have died of the Ctrl-C that comes here, too
                    heard(signal.SIGTERM, None)
            for node in nodes:
                node.go_on()
            if over and not ready:
                return first or _first_failed(nodes, least)
            for number in received[told:]:
                told += 1
                for node in nodes:
                    node.tell(number)
            if first is None and not received:
                first = _first_failed(nodes, least, (0, LOST) if stay else (0,))
                for other in nodes if first else ():
                    other.tell(0)
            if first or received:
                allowed_s = GRACE_S if first or told > 1 else PATIENCE_S
                end = min(end, time.monotonic() + allowed_s + MARGIN_S)
            if received:
                late = min(late, time.monotonic() + START_S)
            running = [node for node in nodes if node.process.poll() is None]
            if time.monotonic() > late and (hung := [node for node in running if not node.output.marked]):
                _say_cut_off(hung, "had started nothing yet")
                for node in hung:
                    kill(node.process)
                    node.process.wait()
            if time.monotonic() > end:
                _say_cut_off(running, "did not end in time")
                return first


def _say_cut_off(nodes: Sequence[Node], why: str) -> None:
    left = ", ".join(node.host.name for node in nodes)
    print(f"paceline: cut off from {left}, which {why}", file=sys.stderr)


def _first_failed(nodes: Sequence[Node], least: int, well: Sequence[int] = (0,)) -> Node | None:
    """None as long as enough have not. ``well``: codes that are no failure."""
    failed = [node for node in nodes if node.process.poll() not in (None, *well)]
    return failed[0] if len(nodes) - len(failed) < least and failed else None
