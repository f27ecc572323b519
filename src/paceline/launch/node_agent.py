"""Agent of one node of a run that another machine started: reads its orders from stdin, until stdin ends.

Its `main` is what ssh starts; the rest comes through stdin, because anybody can read command
lines. The first line is a JSON object: node, sizes, host, port, engine, command, folder, environment. Each later
line is the number of a signal to pass on, or 0 when a node elsewhere has failed. When stdin ends the launcher is gone:
the node saves and ends, unless it was started to stay, as one of a detached run is. Where a run survives losses, it
ends when all its nodes are without the launcher: one that has lost its line alone trains on.
Once it has its orders it says so on stdout, in a line that the launcher keeps to itself, as it does with each change of
its state: whether it has all state, who the members are, which errors ended its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.environment import variable
from paceline.launch import local, output
from paceline.launch.deploy import receive
from paceline.launch.supervise.local_nodes import DONE
from paceline.launch.supervise.node_lock import NodeLock
from paceline.link.net.ticket import JoinTicket
from paceline.report.log import log

STARTED = b"\x06paceline has started\x06"
SAYS = b"\x06paceline says "  # before an object in JSON, and STARTED's last byte


class Orders:
    """Lines from a file descriptor, without waiting after the first. ``ended``: the launcher is gone."""

    def __init__(self, source: int = 0):
        self._source, self._bytes, self.ended, self._signalled = source, b"", False, False
        self.stays = self.survives = False

    def first(self) -> dict[str, Any]:
        while b"\n" not in self._bytes:
            self._read()
            if self.ended:
                raise ValueError("stdin ended before the orders came; this is started by: paceline run -H HOSTS")
        line, _, self._bytes = self._bytes.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        self.stays, self.survives = bool(said.get("stays")), bool(said.get("returns"))
        return said

    def later(self) -> list[int]:
        """Signals to pass on since the last call; 0: end soon. A launcher that is gone asks for both, once, where its
        going is the end."""
        ended = self.ended
        while not self.ended and select.select([self._source], [], [], 0)[0]:
            self._read()
        *lines, self._bytes = self._bytes.split(b"\n")
        numbers = [int(line) for line in lines]
        if self.ended and not ended and not self.stays:
            # who was already asked to end is saving: a second signal would cut that short
            if self._signalled or any(numbers):
                numbers.append(0)
            else:
                numbers += [signal.SIGHUP] if self.survives else [signal.SIGTERM, 0]
        self._signalled |= any(numbers)
        return numbers

    def _read(self) -> None:
        data = os.read(self._source, 1 << 16)
        self._bytes, self.ended = self._bytes + data, not data


def main() -> int:
    return output.through(_obey)


def _obey() -> int:
    orders = Orders()
    try:
        said = orders.first()
        os.write(1, STARTED + b"\n")
        os.chdir(said["folder"])
        with receive.hold(said["folder"]), contextlib.ExitStack() as stack:
            return _run(said, orders, stack)
    except (ValueError, OSError) as error:
        log.error(str(error))
        return 2


def tell(facts: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more
        os.write(1, SAYS + json.dumps(facts).encode() + STARTED[:1] + b"\n")


def _found(what: str, num_processes: int) -> int:
    """Whether it was so on all nodes, the launcher knows."""
    if what:
        tell({"state": DONE, "found": what})
    return 0


def _run(said: dict[str, Any], orders: Orders, stack: contextlib.ExitStack) -> int:
    environment, done, joins = dict(said["environment"]), None, "ticket" in said
    if "run" in said:
        lock = NodeLock(said["run"], said["node"], said["turn"])
        ended = lock.wait(orders.later, tell if joins or "ended" in said else None)
        if ended is not None:  # without a launcher that could have heard of it
            if not orders.ended:
                lock.path.unlink(missing_ok=True)
            return ended if ended != 255 else 1
        if "ended" in said:
            log.error("this node has ended, and its exit code was not noted")
            return 1
        done = stack.enter_context(lock.taken())

        def note(facts: dict[str, Any]) -> None:
            tell(facts)
            lock.write(members=facts["members"])

    if joins:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
        path = Path(variable("PACELINE_TICKET_FILE", environment) or Path(folder, "ticket.json"))
        environment["PACELINE_TICKET_FILE"] = str(path)
        JoinTicket(environment["PACELINE_SECRET"], **said["ticket"]).write(path)
    code = local.start(
        said["command"],
        said["engine"],
        len(said["sizes"]),
        environment,
        node=said["node"],
        meeting=(said["host"], said["port"]),
        asked=orders.later,
        sizes=said["sizes"],
        returns=said.get("returns", 0),
        joins=joins,
        together=_found if said.get("together") and not joins else None,
        tell=note if "run" in said else None,
    )
    if done:
        done(code, not orders.ended)
    return code


if __name__ == "__main__":
    sys.exit(main())
