"""Sends a question to every host at once, by `paceline run -H` itself, and receives each one's answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.launch.child_processes import end_with
from paceline.launch.hosts import Host, Way
from paceline.launch.output import shown

MARK = "paceline-measured"
GRACE_S = 25.0  # to end every node


@dataclass(frozen=True)
class RemoteQuery:
    """How all are reached. ``names``: variables that go along; ``address``: of host ``first``, as others reach it."""

    way: Way
    names: str = ""
    address: str = ""
    first: str = ""

    def ask(
        self, hosts: Sequence[Host], what: dict[str, Any], limit_s: float, options: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Each host's answer by its name. Raises ValueError with the words of the one that failed, and TimeoutError."""
        names = ",".join(host.target for host in hosts)
        reached = ["--ssh", self.way.ssh, "--python", self.way.python]
        reached += ["--env", self.names] if self.names else []
        reached += ["--address", self.address] if self.address and hosts[0].name == self.first else []
        command = [sys.executable, "-m", "paceline", "run", "-H", names, *reached, *options]
        command += ["-m", "paceline.planner.measure.node_agent", json.dumps(what)]
        own = {name: value for name, value in os.environ.items() if name != "PACELINE_ENGINE"}  # it is said, or none
        asking = subprocess.Popen(
            command,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509 - one system call, safe beside threads
        )
        try:
            output, errors = asking.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            remedy = "; look at them with paceline doctor, or give a shorter --budget" if what["do"] == "node" else ""
            raise TimeoutError(
                f"{names} did not answer within {limit_s:.0f} s when asked for {what['do']}{remedy}"
            ) from None
        finally:
            _end(asking)
        if asking.returncode:
            last = (errors.strip() or f"exit code {asking.returncode}").splitlines()
            # a fault before anything was started is told in several lines, that of a node in the last
            start = next((i for i, line in enumerate(last) if "nothing was started" in line), len(last) - 1)
            raise ValueError(shown("\n".join(last[start:])).removeprefix("paceline: "))
        found = {}
        for line in output.splitlines():
            name, mark, said = line.partition(f"] {MARK} ")
            if mark:
                found[name.removeprefix("[")] = json.loads(said)
        if missing := [host.name for host in hosts if host.name not in found]:
            raise ValueError(f"{', '.join(missing)} ended without an answer when asked for {what['do']}")
        return found


def _end(asking: subprocess.Popen[str]) -> None:
    """Asked first, so that it ends its nodes; then killed, and they see their input end."""
    if asking.poll() is not None:
        return
    asking.terminate()
    try:
        asking.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        asking.kill()
        asking.communicate()
