"""Runs on an examined host: does what each line of stdin orders, and answers with a line. Sent over as source.

It ends when stdin ends, or after LIFE_S whatever happens, and leaves nothing behind.
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
MARK = "paceline doctor: "  # before each answer: what a login writes by itself has none


class DoctorAgent:
    """Each method is an order."""

    def __init__(self) -> None:
        self._software: subprocess.Popen[str] | None = None
        self._gate: pair_probe.Gate | None = None
        self._own, self._secret, self._since = "", b"", time.monotonic()

    def tell(self, folder: str) -> dict[str, Any]:
        """All that can be reported at once; importing torch has begun when this returns."""
        command, pipe, none = [sys.executable, "-c", host_probe.SOFTWARE], subprocess.PIPE, subprocess.DEVNULL
        self._software = subprocess.Popen(command, stdin=none, stdout=pipe, stderr=pipe, text=True, errors="replace")
        return {**host_facts.tell(folder, []), **host_probe.tell(folder)}

    def clock(self) -> float:
        return time.time()

    def open(self, meeting: str, first: bool, interface: str, port: int, secret: str) -> dict[str, Any]:
        """Where this host is, and at which port it now listens; or why it does not."""
        found = host_probe.place(meeting, first, interface)
        if "error" not in found:
            self._own, self._secret = found["address"], bytes.fromhex(secret)
            try:
                self._gate = pair_probe.Gate(self._own, port, self._secret)
                found["port"] = self._gate.port
            except OSError as error:
                found |= {"errno": error.errno, "refused": os.strerror(error.errno or 0)}
        return found

    def reach(self, peers: dict[str, tuple[str, int]], patience_s: float) -> dict[str, str]:
        """For each peer at (address, port): "" where it was reached, else why not."""

        def connect(place: tuple[str, int]) -> str:
            address, port = place
            try:
                pair_probe.reach(self._own, address, port, self._secret, patience_s).close()
            except TimeoutError:
                return f"no answer within {patience_s:.0f} s"
            except OSError as error:
                return error.strerror or str(error)
            return ""

        with ThreadPoolExecutor(max(1, len(peers))) as crowd:  # at once, since each may take all of the patience
            return dict(zip(peers, crowd.map(connect, peers.values()), strict=True))

    def measure(self, address: str, port: int, seconds: float) -> dict[str, Any]:
        """Latency, bandwidth to a peer; ``stalled`` instead of the latter where a flood does not come through."""
        found: dict[str, Any] = {}
        try:
            with pair_probe.reach(self._own, address, port, self._secret, pair_probe.TIMEOUT_S) as line:
                found["latency_s"] = pair_probe.latency_s(line)
            with pair_probe.reach(self._own, address, port, self._secret, pair_probe.TIMEOUT_S) as line:
                found["bytes_per_s"] = pair_probe.bandwidth_per_s(line, seconds)
        except OSError as error:
            found["stalled"] = error.strerror or str(error)
        return found

    def software(self, patience_s: float) -> Any:
        """What torch reports of itself; or why it does not."""
        assert self._software
        try:
            out, errors = self._software.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            return {"late": time.monotonic() - self._since}
        try:
            return json.loads(out.strip().splitlines()[-1])
        except (IndexError, ValueError):
            last = (errors.strip() or f"exit code {self._software.returncode}").splitlines()[-1]
            return {"error": last[:300]}

    def close(self) -> None:
        if self._gate:
            self._gate.close()
        if self._software and self._software.poll() is None:
            self._software.kill()
            self._software.wait()


def main() -> None:
    signal.alarm(LIFE_S)
    with contextlib.closing(DoctorAgent()) as agent:
        for line in sys.stdin:
            order, options = json.loads(line)
            print(f"{MARK}{json.dumps(getattr(agent, order)(**options))}", flush=True)
