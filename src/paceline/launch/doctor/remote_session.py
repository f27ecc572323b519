"""A session of `paceline doctor` with one host, over ssh, or with this machine; sends it the agent as source."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from paceline.engine.node import cgroup_limits
from paceline.launch import machine
from paceline.launch.child_processes import MAX_BYTES, kill, piped, received
from paceline.launch.doctor import agent, host_facts, host_probe, pair_probe, preflight
from paceline.launch.hosts import READ, TOO_OLD, Host, Way, program
from paceline.link.net import auth

POLL_S = 0.5  # how soon a query sees that another thread has closed its session
# in the order of their imports
SOURCES = (host_facts, cgroup_limits, machine, auth, host_probe, pair_probe, agent)
# Executes the modules whose names and sources are in the next line of stdin, in packages created empty: paceline need
# not be installed there. Its syntax runs on Pythons older than 3.10, too, which it refuses.
BOOT = f"""
{TOO_OLD}
import json
from types import ModuleType
for name, text in json.loads(sys.stdin.readline()):
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        sys.modules[".".join(parts[:i])].__path__ = []
    exec(compile(text, name, "exec"), sys.modules[name].__dict__)
    setattr(sys.modules[".".join(parts[:-1])], parts[-1], sys.modules[name])
sys.modules[name].main()
"""


class RemoteSession:
    """A session and its queries raise ConnectionError or TimeoutError, with the reason and the remedy in one line."""

    def __init__(self, host: Host, way: Way, local: bool = False):
        self.host, self._way = host, way
        command = [sys.executable, "-c", READ] if local else way.command(host, "-c", READ)
        try:
            self._process, self._stdin, self._stdout, self._stderr = piped(command)
        except OSError as error:
            raise ConnectionError(preflight.not_started(command[0], error)) from None
        self._received = self._errors = b""
        sources = [(module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8")) for module in SOURCES]
        self._send(program(BOOT.encode()) + json.dumps(sources).encode() + b"\n")

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # `query` reports why the session ended
            self._stdin.write(message)
            self._stdin.flush()

    def query(self, order: str, limit_s: float, **options: Any) -> Any:
        """The host's answer to an order, within the limit; other output of the host is ignored."""
        end = time.monotonic() + limit_s
        self._send(json.dumps([order, options]).encode() + b"\n")
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            selector.register(self._stderr, selectors.EVENT_READ)
            while (left_s := end - time.monotonic()) > 0:
                line, newline, rest = self._received.partition(b"\n")
                if newline:
                    self._received = rest
                    _, mark, answer = line.decode(errors="replace").partition(agent.MARK)
                    if mark:
                        return self._read(answer)
                    continue
                for key, _ in selector.select(min(left_s, POLL_S)):
                    if not (data := os.read(key.fd, 1 << 16)):
                        selector.unregister(key.fileobj)
                    if key.fileobj is self._stderr:
                        self._errors = (self._errors + data)[-MAX_BYTES:]
                    elif not data:
                        raise ConnectionError(self._failure(end))
                    else:
                        self._received = (self._received + data)[-MAX_BYTES:]
                if self._stdout.closed:
                    raise ConnectionError("the examination was ended")
        kill(self._process)
        raise TimeoutError(preflight.no_answer(limit_s))

    def _read(self, answer: str) -> Any:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(reply := json.loads(answer), (dict, float)):
                return reply
        raise ConnectionError(
            f"it answered {answer[:80]!r}, which is no answer of paceline; check what {self._way.python} there is"
        )

    def _failure(self, end: float) -> str:
        try:
            _, errors = received(self._process, min(1.0, max(POLL_S / 5, end - time.monotonic())))
            code = self._process.returncode
        except TimeoutError:
            code, errors = preflight.SSH_FAILED, ""
        return preflight.ended(self.host, self._way, code, self._errors.decode(errors="replace") + errors)

    def close_pipes(self) -> None:
        """Closes the pipes; the agent on the host ends when its stdin ends."""
        for pipe in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(OSError):
                pipe.close()

    def close(self, limit_s: float) -> None:
        """Closes the pipes, waits for the process to end, and kills it after the limit."""
        self.close_pipes()
        try:
            self._process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            kill(self._process)
            self._process.wait()
