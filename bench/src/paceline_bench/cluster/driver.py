"""Starts the nodes of a benchmark, does for them what only the machine that holds them all can, and collects.

A node that wants another rate, or one of them held to a part of its core, asks: rank 0 writes what it wants into the
folder that all share, and waits for the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline_bench.cluster.namespaces import Cluster, unavailable
from paceline_bench.cluster.slow_node import held
from paceline_bench.result import Show

POLL_S = 0.05
LAST_LINES = 12


def drive(
    nodes: int,
    command: Sequence[str],
    folder: Path,
    limit_s: float,
    show: Show,
    delay_ms: float = 0.0,
    rate: str | None = None,
) -> list[dict[str, Any]]:
    """What every node has written, after ``command FOLDER`` has ended on all of them. ``rate``: as they begin.

    Raises ValueError where no cluster can be made, a node fails, or all together need more than ``limit_s``.
    """
    if why := unavailable():
        raise ValueError(f"`paceline bench cluster` makes its nodes on this machine, as network namespaces: {why}")
    with contextlib.ExitStack() as stack:
        heed = stack.enter_context(_ended_by_signals())
        cluster = stack.enter_context(Cluster(nodes, rate, delay_ms))
        secret = secrets.token_hex(32)
        processes = [_start(cluster, node, command, folder, secret) for node in range(nodes)]
        end = time.monotonic() + limit_s
        served = 0
        while any(process.poll() is None for process in processes):
            failed = [n for n, process in enumerate(processes) if process.poll()]
            heed()
            if failed:
                raise ValueError(_failed(failed[0], processes[failed[0]], folder))
            if time.monotonic() > end:
                raise ValueError(f"the nodes were not done after {limit_s:.0f} s; allow fewer steps, or another model")
            if (asked := folder / f"ask-{served}").exists():
                said = _serve(json.loads(asked.read_text()), cluster, processes, stack, show)
                _whole(folder / f"did-{served}", said)
                served += 1
            time.sleep(POLL_S)
        heed()
        if failed := [n for n, process in enumerate(processes) if process.returncode]:
            raise ValueError(_failed(failed[0], processes[failed[0]], folder))
        return [json.loads((folder / f"{node}.json").read_text()) for node in range(nodes)]


def _start(cluster: Cluster, node: int, command: Sequence[str], folder: Path, secret: str) -> subprocess.Popen[Any]:
    with (folder / f"{node}.err").open("w") as errors:
        environment = {"PACELINE_FOLDER": "", "PACELINE_ENGINE": "", "PACELINE_SECRET": secret}
        return cluster.start(node, [sys.executable, *command, str(folder)], environment, stdout=errors, stderr=errors)


def _serve(
    asked: dict[str, Any],
    cluster: Cluster,
    processes: Sequence[subprocess.Popen[Any]],
    stack: contextlib.ExitStack,
    show: Show,
) -> dict[str, Any]:
    if "show" in asked:
        show(asked["show"])
    if "rate" in asked:
        cluster.shape(asked["rate"])
    if "held" in asked:
        node, fraction = asked["held"]
        return {"how": stack.enter_context(held(processes[node].pid, fraction))}
    return {}


def _failed(node: int, process: subprocess.Popen[Any], folder: Path) -> str:
    lines = (folder / f"{node}.err").read_text().strip().splitlines()[-LAST_LINES:]
    return f"node {node} failed (exit code {process.returncode}); the last it said:\n" + "\n".join(lines)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """SIGINT, SIGTERM and SIGHUP take down what was made: they are noted, and what this gives, called often, raises.
    A handler that raised would do so between a thing's making and its being known, and the thing would stay."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)

    def heed() -> None:
        if received:
            raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(128 + received[0])

    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield heed
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Desk:
    """A node's side: asks, and is answered. Only rank 0 does; the others wait for it at their next barrier."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank, self.asked, self.parent = folder, rank, 0, os.getppid()

    def ask(self, **what: Any) -> dict[str, Any]:
        if self.rank:
            return {}
        _whole(self.folder / f"ask-{self.asked}", what)
        answer = self.folder / f"did-{self.asked}"
        self.asked += 1
        while not answer.exists():
            self.stay()
            time.sleep(POLL_S)
        said: dict[str, Any] = json.loads(answer.read_text())
        return said

    def stay(self) -> None:
        """Nobody waits any more for a node whose maker has gone."""
        if os.getppid() != self.parent:
            os._exit(1)

    def tell(self, said: dict[str, Any]) -> None:
        _whole(self.folder / f"{self.rank}.json", said)


def _whole(path: Path, said: dict[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(said))
    part.rename(path)
