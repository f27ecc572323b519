"""Agent of `paceline doctor` on a host: executes the order in each line of stdin, and answers with a line.

It is sent to the host as source. It ends when stdin ends, or after LIFE_S, and leaves no files or processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.launch.doctor import host_facts, host_probe, pair_probe

LIFE_S = 60
MARK = "paceline doctor: "  # before each answer, to tell it from the output of a login


class DoctorAgent:
    """Each public method executes the order of its name."""

    def __init__(self) -> None:
        self._software: subprocess.Popen[str] | None = None
        self._server: pair_probe.ProbeServer | None = None
        self._own, self._secret, self._begin_s = "", b"", time.monotonic()

    def tell(self, folder: str) -> dict[str, Any]:
        """The metadata that needs no other host and no torch; starts to import torch in a child process."""
        command, pipe, none = [sys.executable, "-c", host_probe.SOFTWARE], subprocess.PIPE, subprocess.DEVNULL
        self._software = subprocess.Popen(command, stdin=none, stdout=pipe, stderr=pipe, text=True, errors="replace")
        return {**host_facts.collect(folder, []), **host_probe.collect(folder)}

    def clock(self) -> float:
        return time.time()

    def open(self, meeting: str, first: bool, interface: str, port: int, secret: str) -> dict[str, Any]:
        """This host's own address and the port at which it now listens, or the reason why it does not."""
        found = host_probe.find_addresses(meeting, first, interface)
        if "error" not in found:
            self._own, self._secret = found["address"], bytes.fromhex(secret)
            try:
                self._server = pair_probe.ProbeServer(self._own, port, self._secret)
                found["port"] = self._server.port
            except OSError as error:
                found |= {"errno": error.errno, "refused": os.strerror(error.errno or 0)}
        return found

    def reach(self, peers: dict[str, tuple[str, int]], patience_s: float) -> dict[str, str]:
        """For each peer at (address, port): "" if it was reached, else the reason why not."""

        def connect(endpoint: tuple[str, int]) -> str:
            address, port = endpoint
            try:
                pair_probe.reach(self._own, address, port, self._secret, patience_s).close()
            except TimeoutError:
                return f"no answer within {patience_s:.0f} s"
            except OSError as error:
                return error.strerror or str(error)
            return ""

        with ThreadPoolExecutor(max(1, len(peers))) as pool:  # in parallel, since each may take patience_s
            return dict(zip(peers, pool.map(connect, peers.values()), strict=True))

    def measure(self, address: str, port: int, seconds: float) -> dict[str, Any]:
        """Latency and bandwidth to a peer; ``stalled``: the error, if either measurement fails."""
        found: dict[str, Any] = {}
        try:
            with pair_probe.reach(self._own, address, port, self._secret, pair_probe.TIMEOUT_S) as connection:
                found["latency_s"] = pair_probe.latency_s(connection)
            with pair_probe.reach(self._own, address, port, self._secret, pair_probe.TIMEOUT_S) as connection:
                found["bytes_per_s"] = pair_probe.bandwidth_per_s(connection, seconds)
        except OSError as error:
            found["stalled"] = error.strerror or str(error)
        return found

    def software(self, patience_s: float) -> Any:
        """Versions and devices that torch reports, or the reason why there are none."""
        assert self._software
        try:
            out, errors = self._software.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            return {"late": time.monotonic() - self._begin_s}
        try:
            return json.loads(out.strip().splitlines()[-1])
        except (IndexError, ValueError):
            last = (errors.strip() or f"exit code {self._software.returncode}").splitlines()[-1]
            return {"error": last[:300]}

    def close(self) -> None:
        if self._server:
            self._server.close()
        if self._software and self._software.poll() is None:
            self._software.kill()
            self._software.wait()


def main() -> None:
    signal.alarm(LIFE_S)
    with contextlib.closing(DoctorAgent()) as agent:
        for line in sys.stdin:
            order, options = json.loads(line)
            print(f"{MARK}{json.dumps(getattr(agent, order)(**options))}", flush=True)
