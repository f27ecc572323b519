"""The node of one host, run there over ssh, with its output, its state and the requests it is sent."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import sys
from typing import Any, BinaryIO

from paceline.launch.child_processes import piped
from paceline.launch.hosts import OWN_PATH, Host, Way
from paceline.launch.node_agent import SAYS, STARTED
from paceline.launch.output import Lines
from paceline.launch.supervise.local_nodes import DONE, FAILED, HOLDS

NODE = f"{OWN_PATH}; from paceline.launch import node_agent; sys.exit(node_agent.main())"


class Node:
    """One host's ssh."""

    def __init__(self, host: Host, index: int, way: Way, result: BinaryIO | None = None, quiet: bool = False):
        self.host, self.index, self.result, self.quiet = host, index, result, quiet
        self.said: dict[str, Any] = {}  # the last that it said of its state
        self.failure: dict[str, Any] = {}  # the last that it said of a failure
        self.counted = self.heard = False
        self.lost = 0
        self.process, self.stdin, stdout, stderr = piped(way.command(host, "-c", NODE))
        self._unsent = bytearray()
        os.set_blocking(self.stdin.fileno(), False)  # an ssh that has stalled takes no more than a pipe holds
        out = sys.stderr if quiet else sys.stdout
        self.output = Lines(host.name, stdout.fileno(), out.buffer, result, STARTED)
        self.output.says, self.output.hear = SAYS, self._hear
        self.errors = Lines(host.name, stderr.fileno(), sys.stderr.buffer)
        self.pipes = {stdout: self.output, stderr: self.errors}

    def _hear(self, said: Any) -> None:
        if isinstance(said, dict):
            self.said, self.heard = said, True
            self.failure = said if said.get("state") == FAILED else self.failure

    def register(self, selector: selectors.BaseSelector) -> None:
        for pipe, lines in self.pipes.items():
            selector.register(pipe, selectors.EVENT_READ, lines)

    @property
    def code(self) -> int:
        """With which it failed, or its line was lost; 0: neither."""
        return self.process.poll() or int(self.failure.get("code") or 0) or self.lost

    @property
    def state(self) -> str:
        """A node that has said nothing yet has been started as a member."""
        code = self.process.poll()
        if code is not None:
            return FAILED if code else DONE
        return str(self.said.get("state", HOLDS))

    def tell(self, what: object) -> None:
        self._unsent += json.dumps(what).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends as much of what is left to send as is taken at once."""
        with contextlib.suppress(OSError):  # its end is seen elsewhere
            while self._unsent:
                del self._unsent[: os.write(self.stdin.fileno(), self._unsent)]

    def close(self) -> None:
        """Ends it there as well: what runs there sees its stdin end."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.stdin, *self.pipes):
            with contextlib.suppress(OSError):
                pipe.close()
