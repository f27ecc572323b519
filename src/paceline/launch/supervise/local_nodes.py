"""The processes of the nodes on the launcher's own machine, and their states."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.launch.child_processes import end_with
from paceline.launch.supervise.restart_policy import Fault, fault
from paceline.report import process_status

# states of a node: it trains with all state; it waits for admission as a joining node; it has ended; it has failed
HOLDS, JOINS, DONE, FAILED = "holds", "joins", "done", "failed"


@dataclass(frozen=True)
class Child:
    """A process of a node. ``joins``: the node was started as a joining node."""

    node: int
    process: subprocess.Popen[bytes]
    joins: bool = False

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        if self.code is None:
            self.process.kill()
            self.process.wait()


class Team:
    """The processes of all nodes here. ``sizes``: processes of each node. ``reports``: folder of their status files.

    ``reports`` None: they write none. ``closed``: their stdin is empty, since the launcher reads its own stdin.
    """

    reports: Path | None = None

    def __init__(self, command: Sequence[str], sizes: Sequence[int], closed: bool):
        self.command, self.sizes, self.closed = command, sizes, closed
        self.environment: dict[str, str] = {}
        self.children: list[Child] = []

    def begin(self, node: int, more: Mapping[str, str] | None = None) -> None:
        """Starts all processes of a node; with ``more`` variables, as a joining node."""
        size = self.sizes[node]
        for local_rank in range(size):
            rank = sum(self.sizes[:node]) + local_rank
            own = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": node}
            environment = {**self.environment, **{name: str(number) for name, number in own.items()}, **(more or {})}
            stdout = subprocess.DEVNULL if local_rank else None  # what a script prints is read once per node
            process = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL if self.closed else None,  # a script must not read the launcher's stdin
                stdout=stdout,
                preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509 - this process has no threads
                start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which passes it on once
            )
            self.children.append(Child(node, process, bool(more)))

    def send(self, number: int, node: int | None = None) -> None:
        for child in self.children:
            if child.code is None and node in (None, child.node):
                child.process.send_signal(number)

    def states(self) -> dict[int, str]:
        """The state of each node that was started: HOLDS, JOINS, DONE or FAILED."""
        return {node: self._state(self._of(node)) for node in dict.fromkeys(child.node for child in self.children)}

    def _of(self, node: int) -> list[Child]:
        return [child for child in self.children if child.node == node]

    def _state(self, children: Sequence[Child]) -> str:
        codes = [child.code for child in children]
        if any(codes):
            return FAILED
        if None not in codes:
            return DONE
        waits = any(child.joins and child.code is None and not self._status(child).get("joined") for child in children)
        return JOINS if waits else HOLDS

    def code(self, node: int) -> int:
        """The exit code of the first process of a node that failed."""
        return next(child.code for child in self._of(node) if child.code)

    def _status(self, child: Child) -> dict[str, object]:
        return process_status.read(self.reports, child.process.pid) if self.reports else {}

    def faults(self) -> frozenset[Fault]:
        """The faults of processes that failed by themselves, not because other processes failed."""
        ended = [(child.code, self._status(child)) for child in self.children if (child.code or 0) > 0]
        return frozenset(found for code, status in ended if (found := fault(code or 0, status)))

    @property
    def begun(self) -> bool:
        """Whether any process has joined."""
        return any(self._status(child).get("joined") for child in self.children)

    def end(self, node: int | None = None) -> None:
        """Kills the processes, or those of ``node``, waits for them, and forgets them."""
        for child in list(self.children):
            if node in (None, child.node):
                child.end()
                self.children.remove(child)
