"""A conversation with one host: over ssh, or with this machine. What answers there is sent over as source."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.launch import check, crossing, facts, patient, symptoms
from paceline.launch.hosts import Host, Way
from paceline.link import proof
from paceline.probe import survey

SOURCES = (facts, survey, proof, symptoms, crossing, patient)  # in the order in which they need each other
# The first line of stdin is names and texts of modules, and the folders above them are made up: nothing of ours need be
# there. Old enough for a Python that is too old.
BOOT = """
import sys
sys.path = [folder for folder in sys.path if folder]  # a file of the user's may be named as one of Python's
import json
if sys.version_info < (3, 10):
    sys.exit("Python %d.%d" % sys.version_info[:2])
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


class Visit:
    """Raises ConnectionError, here and in `ask`, with the reason and the remedy in one line."""

    def __init__(self, host: Host, way: Way, here: bool = False):
        self.host, self._way = host, way
        command = [sys.executable, "-c", BOOT] if here else way.command(host, "-c", BOOT)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the visit
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # a terminal's Ctrl-C comes to this process alone
            )
        except FileNotFoundError:
            self._errors.close()
            raise ConnectionError(check.no_client(command[0])) from None
        assert self._process.stdin
        assert self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._heard = b""
        sources = [(module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8")) for module in SOURCES]
        self._say(sources)

    def _say(self, what: object) -> None:
        with contextlib.suppress(OSError):  # its end is seen by who waits for the answer
            self._stdin.write(json.dumps(what).encode() + b"\n")
            self._stdin.flush()

    def ask(self, order: str, limit_s: float, **words: Any) -> Any:
        """What the host answers to an order, within the limit."""
        end = time.monotonic() + limit_s
        self._say([order, words])
        with selectors.DefaultSelector() as eyes:
            eyes.register(self._stdout, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._heard.partition(b"\n")
                if newline:
                    self._heard = rest
                    _, mark, answer = line.decode(errors="replace").partition(patient.MARK)
                    if mark:
                        return json.loads(answer)
                elif not eyes.select(max(0.0, end - time.monotonic())):
                    self._process.kill()
                    raise ConnectionError(check.no_answer(limit_s))
                elif data := os.read(self._stdout.fileno(), 1 << 16):
                    self._heard += data
                else:
                    raise ConnectionError(self._why())

    def _why(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = check.LOST
        self._errors.seek(0)
        return check.ended(self.host, self._way, code, self._errors.read().decode(errors="replace"))

    def close(self) -> None:
        """What is there ends with its stdin."""
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
