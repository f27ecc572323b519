"""Queries all hosts in parallel, by running `paceline run -H`, and returns each host's answer."""

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
GRACE_S = 25.0  # for `paceline run` to end its nodes


@dataclass(frozen=True)
class RemoteQuery:
    """How hosts are reached. ``names``: variables to set there; ``address``: of host ``first``, as others reach it."""

    way: Way
    names: str = ""
    address: str = ""
    first: str = ""

    def query(
        self, hosts: Sequence[Host], request: dict[str, Any], limit_s: float, options: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Each host's answer, by its name. Raises ValueError with the error of a host that failed; TimeoutError."""
        names = ",".join(host.target for host in hosts)
        reached = ["--ssh", self.way.ssh, "--python", self.way.python]
        reached += ["--env", self.names] if self.names else []
        reached += ["--address", self.address] if self.address and hosts[0].name == self.first else []
        command = [sys.executable, "-m", "paceline", "run", "-H", names, *reached, *options]
        command += ["-m", "paceline.planner.measure.node_agent", json.dumps(request)]
        environment = {name: value for name, value in os.environ.items() if name != "PACELINE_ENGINE"}
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509 - one system call, safe beside threads
        )
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            remedy = "; check them with paceline doctor, or give a shorter --budget" if request["do"] == "node" else ""
            raise TimeoutError(
                f"{names} did not answer within {limit_s:.0f} s when asked for {request['do']}{remedy}"
            ) from None
        finally:
            _end(process)
        if process.returncode:
            last = (errors.strip() or f"exit code {process.returncode}").splitlines()
            # errors found before the start have several lines; a node's error is the last line
            start = next((i for i, line in enumerate(last) if "nothing was started" in line), len(last) - 1)
            raise ValueError(shown("\n".join(last[start:])).removeprefix("paceline: "))
        answers = {}
        for line in output.splitlines():
            name, marker, answer = line.partition(f"] {MARK} ")
            if marker:
                answers[name.removeprefix("[")] = json.loads(answer)
        if missing := [host.name for host in hosts if host.name not in answers]:
            raise ValueError(f"{', '.join(missing)} ended without an answer when asked for {request['do']}")
        return answers


def _end(process: subprocess.Popen[str]) -> None:
    """Terminates the launcher, so that it ends its nodes; kills it after GRACE_S, so that the nodes' stdin ends."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
