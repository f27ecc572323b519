"""Runs the node of one host over ssh: forwards its output, keeps the state that it reports, and sends it requests."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import sys
from typing import Any, BinaryIO

from paceline.launch.child_processes import piped
from paceline.launch.hosts import OWN_PATH, Host, Way
from paceline.launch.node_agent import REPORT_PREFIX, STARTED
from paceline.launch.output import Lines
from paceline.launch.supervise.local_nodes import DONE, FAILED, HOLDS

NODE = f"{OWN_PATH}; from paceline.launch import node_agent; sys.exit(node_agent.main())"


class Node:
    """The ssh process of one host, and the node agent that it started there."""

    def __init__(self, host: Host, index: int, way: Way, result: BinaryIO | None = None, quiet: bool = False):
        self.host, self.index, self.result, self.quiet = host, index, result, quiet
        self.report: dict[str, Any] = {}  # the last report of its state
        self.failure: dict[str, Any] = {}  # the last report of a failure
        self.counted = self.reported = False
        self.previous_code = 0
        self.process, self.stdin, stdout, stderr = piped(way.command(host, "-c", NODE))
        self._unsent = bytearray()
        os.set_blocking(self.stdin.fileno(), False)  # a write to a stalled ssh would block
        out = sys.stderr if quiet else sys.stdout
        self.output = Lines(host.name, stdout.fileno(), out.buffer, result, STARTED)
        self.output.report_prefix, self.output.on_report = REPORT_PREFIX, self._on_report
        self.errors = Lines(host.name, stderr.fileno(), sys.stderr.buffer)
        self.pipes = {stdout: self.output, stderr: self.errors}

    def _on_report(self, report: Any) -> None:
        if isinstance(report, dict):
            self.report, self.reported = report, True
            self.failure = report if report.get("state") == FAILED else self.failure

    def register(self, selector: selectors.BaseSelector) -> None:
        for pipe, lines in self.pipes.items():
            selector.register(pipe, selectors.EVENT_READ, lines)

    @property
    def code(self) -> int:
        """The exit code of a failed node or connection; 0: neither has failed."""
        return self.process.poll() or int(self.failure.get("code") or 0) or self.previous_code

    @property
    def state(self) -> str:
        """HOLDS, JOINS, DONE or FAILED. A node that has not reported yet counts as a member that HOLDS all state."""
        code = self.process.poll()
        if code is not None:
            return FAILED if code else DONE
        return str(self.report.get("state", HOLDS))

    def send(self, message: object) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Writes as many of the unsent bytes as the pipe accepts without blocking."""
        with contextlib.suppress(OSError):  # the caller sees the process's end by poll()
            while self._unsent:
                del self._unsent[: os.write(self.stdin.fileno(), self._unsent)]

    def close(self) -> None:
        """Kills ssh, which ends the node: its agent reads the end of stdin."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.stdin, *self.pipes):
            with contextlib.suppress(OSError):
                pipe.close()
