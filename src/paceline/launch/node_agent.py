"""Agent of one node of a run that a launcher on another machine started: runs the node as stdin orders.

ssh starts `main`. Its orders come through stdin, because every user of a host can read command lines. The first line is
a JSON object: node, sizes, host, port, engine, command, folder, environment. Each later line is the number of a signal
to pass on, or 0 if a node on another host has failed. The end of stdin means that the launcher has ended, or that the
connection has failed. Then the node saves and ends. A node of a detached run continues. A node of a fault-tolerant run
continues as long as another node still has its launcher.
The agent reports on stdout that it has its orders, and then each change of the node's state: whether it has all state,
the members of the run, and the errors that ended its processes. The launcher removes these reports from the output.
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
REPORT_PREFIX = b"\x06paceline says "  # before a JSON object, which the first byte of STARTED ends


class Orders:
    """Orders read from a file descriptor; only the first read waits. ``ended``: the launcher has ended."""

    def __init__(self, source: int = 0):
        self._source, self._bytes, self.ended, self._has_signalled = source, b"", False, False
        self.stays = self.tolerates_loss = False

    def read_request(self) -> dict[str, Any]:
        while b"\n" not in self._bytes:
            self._read()
            if self.ended:
                raise ValueError("stdin ended before the orders; this command is started by: paceline run -H HOSTS")
        line, _, self._bytes = self._bytes.partition(b"\n")
        request: dict[str, Any] = json.loads(line)
        self.stays, self.tolerates_loss = bool(request.get("stays")), bool(request.get("returns"))
        return request

    def signals(self) -> list[int]:
        """Signals received since the last call; 0: end within the grace period. At the end of stdin these are SIGTERM
        and 0, or SIGHUP in a fault-tolerant run, or nothing in a detached one."""
        had_ended = self.ended
        while not self.ended and select.select([self._source], [], [], 0)[0]:
            self._read()
        *lines, self._bytes = self._bytes.split(b"\n")
        numbers = [int(line) for line in lines]
        if self.ended and not had_ended and not self.stays:
            # after an earlier signal the node is saving, which a second one would interrupt
            if self._has_signalled or any(numbers):
                numbers.append(0)
            else:
                numbers += [signal.SIGHUP] if self.tolerates_loss else [signal.SIGTERM, 0]
        self._has_signalled |= any(numbers)
        return numbers

    def _read(self) -> None:
        data = os.read(self._source, 1 << 16)
        self._bytes, self.ended = self._bytes + data, not data


def main() -> int:
    return output.through(_execute)


def _execute() -> int:
    orders = Orders()
    try:
        request = orders.read_request()
        os.write(1, STARTED + b"\n")
        os.chdir(request["folder"])
        with receive.hold(request["folder"]), contextlib.ExitStack() as stack:
            return _run(request, orders, stack)
    except (ValueError, OSError) as error:
        log.error(str(error))
        return 2


def report(values: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended
        os.write(1, REPORT_PREFIX + json.dumps(values).encode() + STARTED[:1] + b"\n")


def _report_found(found: str, num_processes: int) -> int:
    """Reports what `Notes` found on this node; the launcher combines the findings of all nodes."""
    if found:
        report({"state": DONE, "found": found})
    return 0


def _run(request: dict[str, Any], orders: Orders, stack: contextlib.ExitStack) -> int:
    environment, note_exit_code, joins = dict(request["environment"]), None, "ticket" in request
    if "run" in request:
        lock = NodeLock(request["run"], request["node"], request["turn"])
        noted = lock.wait(orders.signals, report if joins or "ended" in request else None)
        if noted is not None:  # the node ended while it had no launcher
            if not orders.ended:
                lock.path.unlink(missing_ok=True)
            return noted if noted != 255 else 1
        if "ended" in request:
            log.error("this node has ended, and its exit code was not noted")
            return 1
        note_exit_code = stack.enter_context(lock.hold())

        def note(values: dict[str, Any]) -> None:
            report(values)
            lock.write(members=values["members"])

    if joins:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
        path = Path(variable("PACELINE_TICKET_FILE", environment) or Path(folder, "ticket.json"))
        environment["PACELINE_TICKET_FILE"] = str(path)
        JoinTicket(environment["PACELINE_SECRET"], **request["ticket"]).write(path)
    code = local.start(
        request["command"],
        request["engine"],
        len(request["sizes"]),
        environment,
        node=request["node"],
        rendezvous=(request["host"], request["port"]),
        signals=orders.signals,
        sizes=request["sizes"],
        returns=request.get("returns", 0),
        joins=joins,
        together=_report_found if request.get("together") and not joins else None,
        report=note if "run" in request else None,
    )
    if note_exit_code:
        note_exit_code(code, not orders.ended)
    return code


if __name__ == "__main__":
    sys.exit(main())
