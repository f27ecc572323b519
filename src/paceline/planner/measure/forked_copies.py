"""Forked and pinned copies of this process that do the same work at once: the cost of sharing memory bandwidth.

They are forked before torch starts its thread pool, so that each can start its own. They end with this process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
import warnings
from collections.abc import Callable
from typing import Any

from paceline.data import collection  # noqa: F401 - copies collect none of what only this process can end

MESSAGE_BYTES = 1 << 20
Work = Callable[[str, dict[str, Any]], Any]


class ForkedCopies:
    """``work(what, options)`` runs in each copy; its result must be JSON. If a copy fails or is late, all end."""

    def __init__(self, count: int, work: Work, cores: list[int], deadline: float):
        self.deadline = deadline
        self.connections: list[socket.socket] = []
        self.pids: list[int] = []
        for _ in range(count):
            parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: the copies use none of them
                pid = os.fork()
            if pid == 0:
                parent_end.close()
                for connection in self.connections:
                    connection.close()
                _serve(child_end, work, cores)
            child_end.close()
            self.connections.append(parent_end)
            self.pids.append(pid)

    def request(self, count: int, what: str, **options: Any) -> list[Any]:
        """The replies of the first ``count`` copies. Raises TimeoutError, or RuntimeError with a copy's error."""
        for i, connection in enumerate(self.connections[:count]):
            connection.send(json.dumps({"what": what, "seat": i, "count": count, **options}).encode())
        answers = []
        for connection in self.connections[:count]:
            poll = select.poll()  # `select.select` fails for file descriptors above 1,023
            poll.register(connection, select.POLLIN)
            if not poll.poll(1e3 * max(0.0, self.deadline - time.monotonic())):
                raise TimeoutError(f"a copy of the process did not finish {what!r} in time")
            reply = json.loads(connection.recv(MESSAGE_BYTES) or b'{"error": "a copy of the process died"}')
            if "error" in reply:
                raise RuntimeError(reply["error"])
            answers.append(reply["value"])
        return answers

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.connections, self.pids = [], []


def _serve(connection: socket.socket, work: Work, cores: list[int]) -> None:
    """Serves requests until the parent closes the connection. Never returns: only the parent continues."""
    try:
        while message := connection.recv(MESSAGE_BYTES):
            request = json.loads(message)
            what, number, count = request.pop("what"), request.pop("seat"), request.pop("count")
            own = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
            os.sched_setaffinity(0, own or cores)
            try:
                value = {"value": work(what, request)}
            except Exception as error:
                value = {"error": f"{type(error).__name__}: {error}"}
            connection.send(json.dumps(value).encode())
    finally:
        os._exit(0)
