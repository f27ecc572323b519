"""A launcher for tests: a node of which a process failed is started again as a joining node, at once, as often as it
takes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launching import HERE, environment
from paceline.launch.local import free_port

OUTLIVED = HERE / "scripts" / "outlived.py"
LIMIT_S = 100.0


@dataclass
class Run:
    """``num_nodes`` nodes of ``local`` processes each, ``minimum`` of which train. ``started``: how often each was."""

    folder: Path
    words: Sequence[str]
    num_nodes: int = 3
    local: int = 1
    minimum: int = 2
    wait_s: float = 60.0
    again: Callable[[int, int], bool] = lambda node, code: True  # whether this node is started again
    more: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ticket, self.err = self.folder / "ticket.json", (self.folder / "stderr").open("w+")
        self.started, self.codes = dict.fromkeys(range(self.num_nodes), 0), dict[int, int]()
        self.processes: dict[int, list[subprocess.Popen[bytes]]] = {}
        self.base = environment(
            WORLD_SIZE=str(self.num_nodes * self.local),
            LOCAL_WORLD_SIZE=str(self.local),
            MASTER_ADDR="127.0.0.1",
            PACELINE_ENGINE=f"processes:{self.local}" if self.local > 1 else "sequential",
            PACELINE_NODES=f"{self.minimum}:{self.num_nodes}",
            PACELINE_SECRET="of this run",
            PACELINE_TICKET_FILE=str(self.ticket),
            PACELINE_WAIT=str(self.wait_s),
            **self.more,
        )
        self.port = str(free_port())

    def begin(self, node: int) -> None:
        late = {"PACELINE_JOIN_TICKET": str(self.ticket), "PACELINE_NODE": str(node)} if self.started[node] else {}
        port = str(free_port()) if late and self.local > 1 else self.port
        self.started[node] += 1
        mine = {**self.base, "GROUP_RANK": str(node), "PACELINE_HOST": f"host{node}", "MASTER_PORT": port, **late}
        command = [sys.executable, str(OUTLIVED), str(self.folder), *self.words]
        self.processes[node] = [
            subprocess.Popen(
                command,
                env={**mine, "RANK": str(node * self.local + rank), "LOCAL_RANK": str(rank)},
                stdout=self.err,
                stderr=self.err,
            )
            for rank in range(self.local)
        ]

    def to_the_end(self, each: Callable[[Run], None] = lambda run: None) -> str:
        """What all have said. ``each`` is called while they run."""
        end = time.monotonic() + LIMIT_S
        try:
            for node in range(self.num_nodes):
                self.begin(node)
            while len(self.codes) < self.num_nodes:
                assert time.monotonic() < end, self.said()
                each(self)
                for node in self.processes.keys() - self.codes.keys():
                    self._look(node)
                time.sleep(0.02)
            return self.said()
        finally:
            for process in [process for some in self.processes.values() for process in some]:
                process.kill()
                process.wait()
            self.err.close()

    def _look(self, node: int) -> None:
        codes = [process.poll() for process in self.processes[node]]
        failed = [code for code in codes if code]
        if failed and self.ticket.exists() and self.again(node, failed[0]):
            for process in self.processes[node]:
                process.kill()
                process.wait()
            self.begin(node)
        elif None not in codes:
            self.codes[node] = failed[0] if failed else 0

    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def kill(self, node: int, number: int = signal.SIGKILL) -> None:
        for process in self.processes[node]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
